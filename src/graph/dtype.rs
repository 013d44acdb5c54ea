//! Storage types: what an element of a value is in memory and on disk. Arithmetic is f32 (f64 in the oracle) whatever the
//! storage; loading widens exactly, storing rounds ([`crate::ops::round`]).

use super::Shape;
use crate::ops::{Real, round};
use std::borrow::Cow;

/// Storage type of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float (f64 in the oracle).
    #[default]
    F32,
    /// IEEE half precision; two share a word of 32 bits.
    F16,
    /// The upper half of an f32; two share a word.
    BF16,
    /// 32-bit unsigned: ids, offsets.
    U32,
}

impl DType {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::F16 | DType::BF16 => 2,
        }
    }

    /// Whether it is one of the 16-bit floats.
    pub fn is_half(self) -> bool {
        self.size() == 2
    }

    /// Bytes of `n` elements in memory: whole words of 32 bits.
    pub fn bytes(self, n: usize) -> usize {
        (n * self.size()).next_multiple_of(4)
    }
}

/// Shape and storage type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueType {
    /// Shape.
    pub shape: Shape,
    /// Storage type.
    pub dtype: DType,
}

impl ValueType {
    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        self.dtype.bytes(self.shape.len())
    }

    /// Bytes of `n` of its elements, for costs.
    pub fn bytes_of(&self, n: usize) -> f64 {
        (n * self.dtype.size()) as f64
    }
}

/// The elements of a value on the host, in its storage type.
#[derive(Clone, Debug, PartialEq)]
pub enum Array<T = f32> {
    /// Floats of the executor.
    F(Vec<T>),
    /// Bits of f16 or bf16.
    H(DType, Vec<u16>),
    /// Ids.
    U(Vec<u32>),
}

impl<T> From<Vec<T>> for Array<T> {
    fn from(v: Vec<T>) -> Self {
        Array::F(v)
    }
}

impl<T: Real> Array<T> {
    /// Of `n` zeros.
    pub fn zeros(dtype: DType, n: usize) -> Self {
        match dtype {
            DType::F32 => Array::F(vec![T::ZERO; n]),
            DType::F16 | DType::BF16 => Array::H(dtype, vec![0; n]),
            DType::U32 => Array::U(vec![0; n]),
        }
    }

    /// Floats, rounded to nearest where the type is a half.
    ///
    /// # Panics
    /// If the type is one of ids.
    pub fn of(dtype: DType, values: impl Iterator<Item = T>) -> Self {
        match dtype {
            DType::F32 => Array::F(values.collect()),
            DType::F16 | DType::BF16 => Array::H(dtype, values.map(|x| round::store(dtype, x)).collect()),
            DType::U32 => panic!("floats for ids"),
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Array::F(v) => v.len(),
            Array::H(_, v) => v.len(),
            Array::U(v) => v.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Storage type.
    pub fn dtype(&self) -> DType {
        match self {
            Array::F(_) => DType::F32,
            Array::H(d, _) => *d,
            Array::U(_) => DType::U32,
        }
    }

    /// The numbers: floats as they lie, others widened.
    pub fn floats(&self) -> Cow<'_, [T]> {
        match self {
            Array::F(v) => Cow::Borrowed(v),
            Array::H(d, v) => Cow::Owned(v.iter().map(|h| round::load(*d, *h)).collect()),
            Array::U(v) => Cow::Owned(v.iter().map(|x| T::of(f64::from(*x))).collect()),
        }
    }
}

impl Array<f32> {
    /// The words that a device holds: two halves share one, the first in its lower bits.
    pub fn words(&self) -> Cow<'_, [u32]> {
        match self {
            Array::F(v) => Cow::Borrowed(bytemuck::cast_slice(v)),
            Array::U(v) => Cow::Borrowed(v),
            Array::H(_, v) => {
                let word = |c: &[u16]| u32::from(c[0]) | u32::from(c.get(1).copied().unwrap_or(0)) << 16;
                Cow::Owned(v.chunks(2).map(word).collect())
            }
        }
    }

    /// The reverse of [`Array::words`], of `n` elements.
    pub fn from_words(dtype: DType, n: usize, words: Vec<u32>) -> Self {
        match dtype {
            DType::F32 => Array::F(bytemuck::cast_vec(words)),
            DType::U32 => Array::U(words),
            DType::F16 | DType::BF16 => {
                let halves = words.iter().flat_map(|w| [*w as u16, (w >> 16) as u16]);
                Array::H(dtype, halves.take(n).collect())
            }
        }
    }

    /// The numbers, floats without a copy.
    pub fn into_floats(self) -> Vec<f32> {
        match self {
            Array::F(v) => v,
            other => other.floats().into_owned(),
        }
    }

    /// The floats themselves.
    ///
    /// # Panics
    /// If it holds something else: whoever takes an array says which types ([`crate::ops::Op::storage`]).
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            Array::F(v) => v,
            other => panic!("{:?} where f32 is taken", other.dtype()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_type() {
        let bytes = |d: DType| [1, 2, 5].map(|n| d.bytes(n));
        assert_eq!([DType::F32, DType::U32].map(bytes), [[4, 8, 20]; 2]);
        assert_eq!([DType::F16, DType::BF16].map(bytes), [[4, 4, 12]; 2]);
    }

    #[test]
    fn two_halves_share_a_word() {
        for (dtype, one) in [(DType::F16, 0x3C00u32), (DType::BF16, 0x3F80)] {
            let a = Array::<f32>::of(dtype, [1.0, -1.0, 0.0].into_iter());
            assert_eq!(*a.words(), [(one | 0x8000) << 16 | one, 0]);
            assert_eq!(Array::from_words(dtype, 3, a.words().into_owned()), a);
            assert_eq!(*a.floats(), [1.0, -1.0, 0.0]);
        }
        let ids = Array::<f32>::U(vec![7, 9]);
        assert_eq!(*ids.words(), [7, 9]);
        assert_eq!(*ids.floats(), [7.0, 9.0]);
    }
}
