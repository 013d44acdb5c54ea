//! The element types of the CPU executor, and the few numeric primitives it vectorises.

use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};

/// f32 (the executor) or f64 (the oracle that shaders and adjoints are tested against).
pub trait Real:
    Copy
    + Send
    + Sync
    + 'static
    + Debug
    + Default
    + PartialOrd
    + bytemuck::Pod
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
    + Sum
{
    /// Runs `f` compiled for the widest vector unit of this machine, chosen at run time by `pulp`. The f64
    /// executor is an oracle, not a product: it runs as compiled, which keeps the build short.
    #[inline(always)]
    fn simd<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Rounds from f64.
    fn of(x: f64) -> Self;
    /// Widens (or keeps).
    fn f64(self) -> f64;
    /// exp, branch-free so that loops over it vectorise (f32: 2 ulp; arguments clamp at ±87).
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Hyperbolic tangent, vectorisable for f32.
    fn tanh(self) -> Self;
    /// ln(1 + x) for x ≥ 0.
    fn ln_1p(self) -> Self;
    /// The larger.
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        if self > o { self } else { o }
    }
    /// The smaller.
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        if self < o { self } else { o }
    }
    /// Absolute value.
    #[inline(always)]
    fn abs(self) -> Self {
        if self < Self::ZERO { -self } else { self }
    }
    /// 1 / (1 + e^-x), stable for every x.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        let e = (-self.abs()).exp();
        let r = Self::ONE / (Self::ONE + e);
        if self >= Self::ZERO { r } else { Self::ONE - r }
    }
    /// ln(1 + e^x), stable for every x.
    #[inline(always)]
    fn softplus(self) -> Self {
        self.max(Self::ZERO) + (-self.abs()).exp().ln_1p()
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    #[inline(always)]
    fn of(x: f64) -> Self {
        x
    }
    #[inline(always)]
    fn f64(self) -> f64 {
        self
    }
    fn exp(self) -> Self {
        f64::exp(self)
    }
    fn ln(self) -> Self {
        f64::ln(self)
    }
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }
    fn tanh(self) -> Self {
        f64::tanh(self)
    }
    fn ln_1p(self) -> Self {
        f64::ln_1p(self)
    }
    fn sigmoid(self) -> Self {
        if self >= 0.0 {
            1.0 / (1.0 + f64::exp(-self))
        } else {
            let e = f64::exp(self);
            e / (1.0 + e)
        }
    }
}

impl Real for f32 {
    #[inline(always)]
    fn simd<R>(f: impl FnOnce() -> R) -> R {
        pulp::Arch::new().dispatch(f)
    }
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    #[inline(always)]
    fn of(x: f64) -> Self {
        x as f32
    }
    #[inline(always)]
    fn f64(self) -> f64 {
        self as f64
    }
    /// Cody-Waite reduction and a degree-6 polynomial: libm's exp is a call, which no loop vectorises over.
    #[inline(always)]
    fn exp(self) -> Self {
        let x = Real::min(Real::max(self, -87.0), 88.0);
        // round to nearest through the 1.5·2^23 trick: no SSE4.1 needed
        const MAGIC: f32 = 12_582_912.0;
        let t = x * std::f32::consts::LOG2_E + MAGIC;
        let n = t - MAGIC;
        let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
        let p = 1.0
            + r * (1.0
                + r * (0.5
                    + r * (1.666_666_5e-1 + r * (4.166_579_6e-2 + r * (8.333_452e-3 + r * 1.398_2e-3)))));
        // n is in the low bits of t; a cast to i32 saturates, and no loop vectorises over that
        p * f32::from_bits(t.to_bits().wrapping_add(127) << 23)
    }
    #[inline(always)]
    fn ln(self) -> Self {
        f32::ln(self)
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }
    #[inline(always)]
    fn tanh(self) -> Self {
        // odd polynomial near 0, where 1 - 2/(e^2x + 1) cancels
        let a = Real::abs(self);
        let x2 = self * self;
        let small = self
            + self * x2 * (-0.333_333_33 + x2 * (0.133_333_33 - x2 * (0.053_968_254 - x2 * 0.021_869_488)));
        let big = 1.0 - 2.0 / (Real::exp(2.0 * Real::min(a, 20.0)) + 1.0);
        if a < 0.25 {
            small
        } else if self < 0.0 {
            -big
        } else {
            big
        }
    }
    #[inline(always)]
    fn ln_1p(self) -> Self {
        f32::ln_1p(self)
    }
}

/// Eight partial sums, so that the loop vectorises and the order does not depend on the vector width.
#[inline(always)]
pub fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let mut s = [T::ZERO; 16];
    let (ac, ar) = a.as_chunks::<16>();
    let (bc, br) = b.as_chunks::<16>();
    for (x, y) in ac.iter().zip(bc) {
        for i in 0..16 {
            s[i] += x[i] * y[i];
        }
    }
    let mut t = T::ZERO;
    for (x, y) in ar.iter().zip(br) {
        t += *x * *y;
    }
    fold16(s) + t
}

/// Sum of a slice with sixteen partial sums.
#[inline(always)]
pub fn sum<T: Real>(a: &[T]) -> T {
    let mut s = [T::ZERO; 16];
    let (ac, ar) = a.as_chunks::<16>();
    for x in ac {
        for i in 0..16 {
            s[i] += x[i];
        }
    }
    let mut t = T::ZERO;
    for x in ar {
        t += *x;
    }
    fold16(s) + t
}

#[inline(always)]
fn fold16<T: Real>(mut s: [T; 16]) -> T {
    for w in [8, 4, 2, 1] {
        for i in 0..w {
            s[i] += s[i + w];
        }
    }
    s[0]
}

/// y += a·x
#[inline(always)]
pub fn axpy<T: Real>(a: T, x: &[T], y: &mut [T]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * *x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f32_functions_are_close_to_libm() {
        let (mut worst_exp, mut worst_tanh, mut worst_sig) = (0f64, 0f64, 0f64);
        for i in -86_000..86_000 {
            let x = i as f32 * 1e-3;
            let e = (x as f64).exp();
            worst_exp = worst_exp.max((Real::exp(x) as f64 - e).abs() / e);
            let t = (x as f64).tanh();
            worst_tanh = worst_tanh.max((Real::tanh(x) as f64 - t).abs() / t.abs().max(1e-30));
            let s = 1.0 / (1.0 + (-x as f64).exp());
            worst_sig = worst_sig.max((Real::sigmoid(x) as f64 - s).abs());
        }
        assert!(worst_exp < 3e-7, "exp {worst_exp:e}");
        assert!(worst_tanh < 1e-6, "tanh {worst_tanh:e}");
        assert!(worst_sig < 2e-7, "sigmoid {worst_sig:e}");
        assert_eq!(Real::tanh(0f32), 0.0);
        assert!(Real::exp(-1e30f32) >= 0.0 && Real::exp(-1e30f32) < 1e-37);
    }
}
