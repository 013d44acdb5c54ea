//! Element types, and how two of them become one.

use bytemuck::Pod;
use half::{bf16, f16};

/// How [`all_reduce`](super::Communicator::all_reduce) combines elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// a + b; integers wrap.
    #[default]
    Sum,
    /// The larger.
    Max,
    /// The smaller.
    Min,
}

/// A type that can be sent between ranks.
pub trait Element: Pod + Send + Sync + PartialEq + std::fmt::Debug + 'static {
    /// Its name in messages.
    const NAME: &'static str;
    /// Zero.
    const ZERO: Self;
    /// Whether sums go by way of f32: half-precision types, whose partial sums would lose bits.
    const THROUGH_F32: Option<super::Wire> = None;
    /// `a` becomes `a ∘ b`, element by element.
    fn combine(how: Reduction, a: &mut [Self], b: &[Self]);
    /// This value in f32, for the types that sum through it.
    fn to_f32(self) -> f32 {
        unreachable!("{} is summed as it is", Self::NAME)
    }
    /// The nearest value of this type.
    fn from_f32(_: f32) -> Self {
        unreachable!("{} is summed as it is", Self::NAME)
    }
}

macro_rules! integer {
    ($($t:ty),*) => {$(
        impl Element for $t {
            const NAME: &'static str = stringify!($t);
            const ZERO: Self = 0;
            fn combine(how: Reduction, a: &mut [Self], b: &[Self]) {
                match how {
                    Reduction::Sum => a.iter_mut().zip(b).for_each(|(a, b)| *a = a.wrapping_add(*b)),
                    Reduction::Max => a.iter_mut().zip(b).for_each(|(a, b)| *a = (*a).max(*b)),
                    Reduction::Min => a.iter_mut().zip(b).for_each(|(a, b)| *a = (*a).min(*b)),
                }
            }
        }
    )*};
}

integer!(u8, u32, u64);

impl Element for f32 {
    const NAME: &'static str = "f32";
    const ZERO: Self = 0.0;
    fn combine(how: Reduction, a: &mut [Self], b: &[Self]) {
        match how {
            Reduction::Sum => a.iter_mut().zip(b).for_each(|(a, b)| *a += *b),
            // a number that is not one stays visible, whichever side it is on
            Reduction::Max => a.iter_mut().zip(b).for_each(|(a, b)| *a = pick(*a, *b, *b > *a)),
            Reduction::Min => a.iter_mut().zip(b).for_each(|(a, b)| *a = pick(*a, *b, *b < *a)),
        }
    }
}

fn pick(a: f32, b: f32, second: bool) -> f32 {
    if a.is_nan() {
        a
    } else if b.is_nan() || second {
        b
    } else {
        a
    }
}

macro_rules! half {
    ($t:ty, $name:literal, $wire:expr) => {
        impl Element for $t {
            const NAME: &'static str = $name;
            const ZERO: Self = <$t>::ZERO;
            const THROUGH_F32: Option<super::Wire> = Some($wire);
            fn combine(_: Reduction, _: &mut [Self], _: &[Self]) {
                unreachable!("summed through f32")
            }
            fn to_f32(self) -> f32 {
                <$t>::to_f32(self)
            }
            fn from_f32(x: f32) -> Self {
                <$t>::from_f32(x)
            }
        }
    };
}

half!(f16, "f16", super::Wire::F16);
half!(bf16, "bf16", super::Wire::Bf16);
