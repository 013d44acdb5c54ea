//! Rounding to 16 bits and back, on bit patterns, so that every executor gets the same bits (`cast.wgsl` has the same
//! integer arithmetic): to nearest, ties to even. A magnitude beyond the largest finite value becomes that value, a NaN
//! stays one, zeros keep their sign, and subnormals are numbers like others.

use super::Real;
use crate::graph::DType;

const INFINITY: u32 = 0x7F80_0000;

/// A half as it is made of an f32.
struct Format {
    /// Bits of its significand after the leading one.
    places: u32,
    /// The f32 exponent (biased) of its least normal number.
    least: u32,
    /// Its largest finite value, as an f32's bits.
    largest: u32,
}

impl Format {
    fn of(to: DType) -> Format {
        match to {
            DType::F16 => Format { places: 10, least: 113, largest: 0x477F_E000 },
            DType::BF16 => Format { places: 7, least: 1, largest: 0x7F7F_0000 },
            other => panic!("{other:?} is no 16-bit float"),
        }
    }

    /// The half of a magnitude. `units(m, k)` rounds m·2⁻ᵏ to a whole number: m is the f32's significand, k the number of
    /// its bits that fall below the half's last place.
    fn magnitude(&self, a: u32, units: impl FnOnce(u32, u32) -> u32) -> u16 {
        if a > self.largest {
            // all bits of the exponent, and the highest of the significand; or one less than infinity
            let infinity = 0x7FFF >> self.places << self.places;
            return if a > INFINITY { infinity | 1 << (self.places - 1) } else { infinity - 1 };
        }
        let exponent = (a >> 23).max(1);
        let m = if a >> 23 == 0 { a } else { a & 0x7F_FFFF | 0x80_0000 };
        let k = 23 - self.places + self.least.saturating_sub(exponent);
        // a normal number's leading bit counts one up in the exponent
        (units(m, k) + (exponent.saturating_sub(self.least) << self.places)) as u16
    }
}

/// The half nearest to an f32 of these bits.
///
/// # Panics
/// If the type is no half.
pub fn narrow(to: DType, bits: u32) -> u16 {
    let nearest = |m: u32, k: u32| match k {
        25.. => 0,
        _ => (m + (1 << (k - 1)) - 1 + (m >> k & 1)) >> k,
    };
    (bits >> 16 & 0x8000) as u16 | Format::of(to).magnitude(bits & 0x7FFF_FFFF, nearest)
}

/// One of the two halves around an f32 of these bits, the nearer one the more often: of `random`, any 32 bits, as many of
/// the lowest are added as bits are dropped. What a half holds exactly never changes.
///
/// # Panics
/// If the type is no half.
pub fn narrow_stochastic(to: DType, bits: u32, random: u32) -> u16 {
    let up_or_down = |m: u32, k: u32| {
        let (m, k) = (u64::from(m >> k.saturating_sub(32).min(31)), k.min(32));
        let below = (1u64 << k) - 1;
        ((m + (u64::from(random) & below)) >> k) as u32
    };
    (bits >> 16 & 0x8000) as u16 | Format::of(to).magnitude(bits & 0x7FFF_FFFF, up_or_down)
}

/// The bits of the f32 that a half is.
///
/// # Panics
/// If the type is no half.
pub fn widen(from: DType, half: u16) -> u32 {
    let (sign, a) = (u32::from(half & 0x8000) << 16, u32::from(half & 0x7FFF));
    match from {
        DType::BF16 => u32::from(half) << 16,
        DType::F16 => {
            sign | match (a >> 10, a & 0x3FF) {
                (31, m) => INFINITY | m << 13,
                (0, 0) => 0,
                (0, m) => {
                    let lead = 31 - m.leading_zeros();
                    (lead + 103) << 23 | (m << (23 - lead)) & 0x7F_FFFF
                }
                (e, m) => (e + 112) << 23 | m << 13,
            }
        }
        other => panic!("{other:?} is no 16-bit float"),
    }
}

/// [`narrow`] of a number; the oracle's is rounded to f32 first.
pub fn store<T: Real>(to: DType, x: T) -> u16 {
    narrow(to, (x.f64() as f32).to_bits())
}

/// [`widen`] to a number.
pub fn load<T: Real>(from: DType, half: u16) -> T {
    T::of(f64::from(f32::from_bits(widen(from, half))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALVES: [DType; 2] = [DType::F16, DType::BF16];

    /// By another implementation, except where that overflows to infinity.
    #[test]
    fn every_half_and_what_lies_around_it() {
        for to in HALVES {
            let largest = widen(to, if to == DType::F16 { 0x7BFF } else { 0x7F7F });
            for h in 0..=u16::MAX {
                let bits = widen(to, h);
                let x = f32::from_bits(bits);
                let theirs = match to {
                    DType::F16 => half::f16::from_bits(h).to_f32(),
                    _ => half::bf16::from_bits(h).to_f32(),
                };
                assert!(x == theirs || x.is_nan() && theirs.is_nan(), "{to:?} {h:#x}: {x} {theirs}");
                if x.is_nan() {
                    assert!(f32::from_bits(widen(to, narrow(to, bits))).is_nan());
                    assert_eq!(narrow(to, bits) & 0x8000, h & 0x8000);
                    continue;
                }
                if x.is_infinite() {
                    assert_eq!(widen(to, narrow(to, bits)) & 0x7FFF_FFFF, largest);
                    continue;
                }
                assert_eq!(narrow(to, bits), h, "{to:?} {x}: what is exact stays");
                // between this one and the next away from zero: before the middle, the middle, after it
                let next = widen(to, h.wrapping_add(1));
                if next & 0x7FFF_FFFF > largest {
                    continue;
                }
                let middle = ((f64::from(x) + f64::from(f32::from_bits(next))) / 2.0) as f32;
                for near in [middle.to_bits() - 1, middle.to_bits(), middle.to_bits() + 1] {
                    let y = f32::from_bits(near);
                    let theirs = match to {
                        DType::F16 => half::f16::from_f32(y).to_bits(),
                        _ => half::bf16::from_f32(y).to_bits(),
                    };
                    assert_eq!(narrow(to, near), theirs, "{to:?} {y}");
                }
            }
        }
    }

    /// Every random number once gives the mean exactly, and what is exact stays.
    #[test]
    fn stochastic_rounding_has_no_bias() {
        for (to, bits, dropped) in [
            (DType::BF16, 0x3F81_2345u32, 16),
            (DType::F16, 0xBF81_2345, 13),
            // subnormal: 2^-16 loses 15 bits
            (DType::F16, 0x3781_2345, 15),
        ] {
            let sum: f64 = (0..1u32 << dropped)
                .map(|r| f64::from(f32::from_bits(widen(to, narrow_stochastic(to, bits, r | 0xFFF0_0000)))))
                .sum();
            assert_eq!(sum / f64::from(1 << dropped), f64::from(f32::from_bits(bits)), "{to:?} {bits:#x}");
            let exact = widen(to, narrow(to, bits));
            assert_eq!(narrow_stochastic(to, exact, u32::MAX), narrow(to, bits));
        }
        // far below the least subnormal the chance is gone
        assert_eq!(narrow_stochastic(DType::F16, 0x2000_0000, u32::MAX), 0);
    }

    #[test]
    fn beyond_the_range_it_saturates() {
        let f16 = |x: f32| narrow(DType::F16, x.to_bits());
        assert_eq!([65504.0, 65505.0, 1e30, f32::INFINITY].map(f16), [0x7BFF; 4]);
        assert_eq!(f16(f32::NEG_INFINITY), 0xFBFF);
        let bf16 = |x: f32| narrow(DType::BF16, x.to_bits());
        assert_eq!([f32::MAX, f32::INFINITY].map(bf16), [0x7F7F; 2]);
        assert_eq!([0.0, -0.0, f32::from_bits(1), -1e-30].map(f16), [0, 0x8000, 0, 0x8000]);
    }
}
