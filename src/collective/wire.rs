//! What f32 values look like between ranks. Sums are always made in f32; only what travels is narrower.
//!
//! | format | bytes a value | error |
//! |---|---|---|
//! | `f32` | 4 | none |
//! | `bf16` | 2 | 2⁻⁸ of the value |
//! | `f16` | 2 | 2⁻¹¹ of the value from 6e-5 to 65504; larger ones become infinite |
//! | `int8` | 1 + 4/256 | 1/254 of the largest in its block of 256 |
//!
//! A value that is not finite stays so in every format: the trainer's guard must see it.

use half::f16;
use half::slice::HalfFloatSliceExt;
use std::fmt;
use std::str::FromStr;

/// Values that share one scale in `int8`.
pub const BLOCK: usize = 256;

/// A format for f32 on the way. See the module's documentation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Wire {
    /// As they are.
    #[default]
    F32,
    /// The upper half of an f32, rounded to nearest even.
    Bf16,
    /// IEEE half precision.
    F16,
    /// A scale for each block of [`BLOCK`] and a signed byte each.
    Int8,
}

impl Wire {
    /// All of them.
    pub const ALL: [Wire; 4] = [Wire::F32, Wire::Bf16, Wire::F16, Wire::Int8];

    /// Whether values come out as they went in.
    pub fn is_exact(self) -> bool {
        self == Wire::F32
    }

    /// Bytes of `n` values.
    pub fn len(self, n: usize) -> usize {
        match self {
            Wire::F32 => 4 * n,
            Wire::Bf16 | Wire::F16 => 2 * n,
            Wire::Int8 => n + 4 * n.div_ceil(BLOCK),
        }
    }

    /// Appends `values` to `out`.
    pub fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        let begin = out.len();
        out.resize(begin + self.len(values.len()), 0);
        let out = &mut out[begin..];
        match self {
            Wire::F32 => out.copy_from_slice(bytemuck::cast_slice(values)),
            Wire::Bf16 => {
                for (o, v) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                    *o = to_bf16(*v).to_le_bytes();
                }
            }
            Wire::F16 => {
                let mut half = [f16::ZERO; BLOCK];
                for (o, v) in out.chunks_mut(2 * BLOCK).zip(values.chunks(BLOCK)) {
                    half[..v.len()].convert_from_f32_slice(v);
                    o.copy_from_slice(bytemuck::cast_slice(&half[..v.len()]));
                }
            }
            Wire::Int8 => {
                let (scales, bytes) = out.split_at_mut(4 * values.len().div_ceil(BLOCK));
                let blocks = bytes.chunks_mut(BLOCK).zip(values.chunks(BLOCK));
                for (s, (o, v)) in scales.as_chunks_mut::<4>().0.iter_mut().zip(blocks) {
                    *s = quantise(v, o).to_le_bytes();
                }
            }
        }
    }

    /// Calls `f(place, values)` on stretches of the decoded values.
    fn decode(self, bytes: &[u8], n: usize, mut f: impl FnMut(usize, &[f32])) {
        let mut block = [0f32; BLOCK];
        for at in (0..n).step_by(BLOCK) {
            let len = BLOCK.min(n - at);
            let block = &mut block[..len];
            match self {
                Wire::F32 => {
                    for (b, x) in block.iter_mut().zip(bytes[4 * at..].as_chunks::<4>().0) {
                        *b = f32::from_le_bytes(*x);
                    }
                }
                Wire::Bf16 => {
                    for (b, x) in block.iter_mut().zip(bytes[2 * at..].as_chunks::<2>().0) {
                        *b = f32::from_bits(u32::from(u16::from_le_bytes(*x)) << 16);
                    }
                }
                Wire::F16 => {
                    let mut half = [f16::ZERO; BLOCK];
                    for (b, x) in half.iter_mut().zip(bytes[2 * at..].as_chunks::<2>().0) {
                        *b = f16::from_le_bytes(*x);
                    }
                    half[..len].convert_to_f32_slice(block);
                }
                Wire::Int8 => {
                    let scales = 4 * n.div_ceil(BLOCK);
                    let s = bytes[4 * (at / BLOCK)..].first_chunk::<4>().expect("a scale a block");
                    let s = f32::from_le_bytes(*s);
                    for (b, q) in block.iter_mut().zip(&bytes[scales + at..]) {
                        *b = f32::from(*q as i8) * s;
                    }
                }
            }
            f(at, block);
        }
    }

    /// Overwrites `values` with what `bytes` hold.
    ///
    /// # Panics
    /// If there are fewer bytes than [`Wire::len`] says.
    pub fn store(self, bytes: &[u8], values: &mut [f32]) {
        let n = values.len();
        self.decode(bytes, n, |at, x| values[at..][..x.len()].copy_from_slice(x));
    }

    /// Adds what `bytes` hold to `values`.
    ///
    /// # Panics
    /// As [`Wire::store`].
    pub fn add(self, bytes: &[u8], values: &mut [f32]) {
        let n = values.len();
        self.decode(bytes, n, |at, x| {
            for (v, x) in values[at..].iter_mut().zip(x) {
                *v += x;
            }
        });
    }
}

/// Round to nearest even; a NaN stays one.
fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// The scale of a block, whose bytes go to `out`.
fn quantise(v: &[f32], out: &mut [u8]) -> f32 {
    // by their bits, absolute values order as integers do, and what is not finite is the largest: one pass that becomes
    // vector instructions, which a maximum of floats does not
    let top = v.iter().fold(0, |m, x| m.max((x.to_bits() & 0x7FFF_FFFF) as i32));
    let top = f32::from_bits(top as u32);
    if !top.is_finite() {
        out.fill(1);
        return f32::NAN;
    }
    // the largest of denormal blocks would make the inverse infinite
    let scale = (top / 127.0).max(f32::MIN_POSITIVE);
    let inverse = 1.0 / scale;
    // adding 1.5·2²³ rounds to nearest even; the integer is then in the lowest bits
    const ROUND: f32 = 12_582_912.0;
    for (o, x) in out.iter_mut().zip(v) {
        *o = ((x * inverse).clamp(-127.0, 127.0) + ROUND).to_bits() as u8;
    }
    scale
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Wire::F32 => "f32",
            Wire::Bf16 => "bf16",
            Wire::F16 => "f16",
            Wire::Int8 => "int8",
        })
    }
}

impl FromStr for Wire {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Wire::ALL
            .into_iter()
            .find(|w| w.to_string() == s)
            .ok_or_else(|| format!("unknown wire format {s:?}; expected f32, bf16, f16 or int8"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(w: Wire, v: &[f32]) -> Vec<f32> {
        let mut bytes = vec![];
        w.encode(v, &mut bytes);
        assert_eq!(bytes.len(), w.len(v.len()));
        let mut back = vec![7.0; v.len()];
        w.store(&bytes, &mut back);
        let mut twice = back.clone();
        w.add(&bytes, &mut twice);
        assert!(twice.iter().zip(&back).all(|(t, b)| t.to_bits() == (b + b).to_bits()));
        back
    }

    #[test]
    fn errors_are_bounded() {
        for n in [0, 1, 255, 256, 257, 1000] {
            let v: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.37f32.powi(i % 7)).collect();
            assert_eq!(round_trip(Wire::F32, &v), v);
            for (a, b) in v.iter().zip(round_trip(Wire::Bf16, &v)) {
                assert!((a - b).abs() <= a.abs() / 256.0, "{a} {b}");
            }
            for (a, b) in v.iter().zip(round_trip(Wire::F16, &v)) {
                assert!((a - b).abs() <= a.abs() / 2048.0 + 1e-7, "{a} {b}");
            }
            let back = round_trip(Wire::Int8, &v);
            for (a, b) in v.chunks(BLOCK).zip(back.chunks(BLOCK)) {
                let top = a.iter().fold(0f32, |m, x| m.max(x.abs()));
                assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= top / 253.0));
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        for w in Wire::ALL {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut v = vec![1.0; 300];
                v[280] = bad;
                let back = round_trip_no_sum(w, &v);
                assert!(!back[280].is_finite(), "{w} {bad}");
                assert_eq!(back[0], 1.0, "{w}");
            }
        }
    }

    fn round_trip_no_sum(w: Wire, v: &[f32]) -> Vec<f32> {
        let mut bytes = vec![];
        w.encode(v, &mut bytes);
        let mut back = vec![7.0; v.len()];
        w.store(&bytes, &mut back);
        back
    }

    /// The format, value by value.
    #[test]
    fn int8_is_as_described() {
        for n in [1usize, 7, 256, 300] {
            for power in [1e-40f32, 1e-30, 1.0, 1e30] {
                let v: Vec<f32> = (0..n).map(|i| ((i * 7919 % 1999) as f32 - 999.0) * power).collect();
                let mut bytes = vec![];
                Wire::Int8.encode(&v, &mut bytes);
                let (scales, bytes) = bytes.split_at(4 * n.div_ceil(BLOCK));
                for (i, v) in v.chunks(BLOCK).enumerate() {
                    let top = v.iter().fold(0f32, |m, x| m.max(x.abs()));
                    let scale = (top / 127.0).max(f32::MIN_POSITIVE);
                    assert_eq!(scales[4 * i..4 * i + 4], scale.to_le_bytes(), "{n} {power}");
                    for (q, x) in bytes[i * BLOCK..].iter().zip(v) {
                        assert_eq!(*q as i8, (x * (1.0 / scale)).round_ties_even() as i8, "{n} {power} {x}");
                    }
                }
            }
        }
    }

    #[test]
    fn small_blocks_and_zeros() {
        assert_eq!(round_trip(Wire::Int8, &[0.0; 5]), [0.0; 5]);
        let tiny = round_trip(Wire::Int8, &[1e-42, -1e-42]);
        assert!(tiny.iter().all(|x| x.abs() < 1e-36));
    }
}
