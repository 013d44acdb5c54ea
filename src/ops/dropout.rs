//! `dropout`: x `[..]`, key `[2]` (ids) → y of the same shape: each element is 0 with probability p, else x/(1 − p).
//!
//! Which elements stay is a hash of (key, site, index of the element), so that a mask is never stored: the derivative is
//! the same operation on the gradient, and a run that goes on in the middle draws what it would have drawn. Integer
//! arithmetic alone decides, on every executor alike. The key is [`key`] of seed, step and part of the batch; the site
//! tells the dropouts of a model apart.
//!
//! The hash is `lowbias32` (C. Wellons, <https://nullprogram.com/blog/2018/07/31/>) twice, the second time over a word
//! of the key that the first has not seen.

use super::copy::words;
use super::cpu::par_rows;
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Dropout {
    /// Probability of a zero, at least 0 and below 1.
    p: f64,
    /// Which of the model's dropouts it is.
    site: u32,
}

/// The key of a step's masks: both words depend on all three numbers.
pub fn key(seed: u64, step: u64, part: u64) -> [u32; 2] {
    let mut bytes = [0; 24];
    for (b, v) in bytes.chunks_exact_mut(8).zip([seed, step, part]) {
        b.copy_from_slice(&v.to_le_bytes());
    }
    let h = xxhash_rust::xxh3::xxh3_64(&bytes);
    [h as u32, (h >> 32) as u32]
}

/// A bijection of 32-bit words in which every bit of the result depends on every bit of `x`.
fn mix(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

impl Dropout {
    /// An element is kept when its word is at least this.
    fn threshold(&self) -> u32 {
        (self.p * f64::from(u32::MAX)) as u32
    }

    /// The key's words as this site sees them.
    fn words(&self, key: &[u32]) -> [u32; 2] {
        let site = mix(self.site.wrapping_add(0x9e37_79b9));
        [mix(key[0] ^ site), mix(key[1].wrapping_add(site))]
    }

    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let [a, b] = self.words(c.ids(1));
        let (threshold, scale) = (self.threshold(), T::of(self.scale()));
        // x may share its buffer with y: both through the raw pointer of the input
        let x = Src(c.input_raw(0).0);
        let out = c.output(0);
        par_rows(out, 1, |first, out| {
            for (i, y) in out.iter_mut().enumerate() {
                let at = first + i;
                let keep = mix(mix((at as u32).wrapping_add(a)) ^ b) >= threshold;
                // SAFETY: x has as many elements as y; element `at` is read before it is written, and by this
                // task alone.
                let v = unsafe { *x.get().add(at) };
                *y = if keep { v * scale } else { T::ZERO };
            }
        });
    }

    /// 1/(1 − p) as both executors have it.
    fn scale(&self) -> f64 {
        f64::from((1.0 / (1.0 - self.p)) as f32)
    }
}

struct Src<T>(*const T);
// SAFETY: only read, each element by one task.
unsafe impl<T> Sync for Src<T> {}
impl<T> Src<T> {
    fn get(&self) -> *const T {
        self.0
    }
}

impl Op for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn outputs(&self, s: &[Shape]) -> Vec<Shape> {
        assert_eq!(s[1].len(), 2, "a key is two words");
        assert!(s[0].len() <= u32::MAX as usize, "dropout counts its elements in 32 bits");
        vec![s[0]]
    }

    fn flops(&self, _: &[Shape], outputs: &[Shape]) -> f64 {
        outputs[0].len() as f64
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dy = v.grads[0].expect("called with a gradient");
        vec![Some(g.push(self.clone(), &[dy, v.inputs[1]])), None]
    }

    fn may_alias(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let n = r.outputs[0].len();
        let in_place = r.in_place.is_some();
        let (x, key) = match in_place {
            true => ("", 0),
            false => ("@group(0) @binding(0) var<storage, read> x : array<f32>;", 1),
        };
        let source = include_str!("../../shaders/dropout.wgsl")
            .replace("{{x}}", x)
            .replace("{{read}}", if in_place { "y[i]" } else { "x[i]" })
            .replace("{{key}}", &key.to_string())
            .replace("{{y}}", &(key + 1).to_string())
            .replace("{{p}}", &(key + 2).to_string());
        let mut bindings = if in_place { vec![] } else { vec![Bind::In(0)] };
        bindings.extend([Bind::In(1), Bind::Out(0)]);
        let site = mix(self.site.wrapping_add(0x9e37_79b9));
        Kernel {
            label: "dropout".into(),
            source: source.into(),
            entry: "main",
            constants: vec![],
            bindings,
            params: words(&[n as u32, site, self.threshold(), (self.scale() as f32).to_bits()]),
            groups: fold_groups(n.div_ceil(64) as u64),
        }
        .into()
    }
}

impl Graph {
    /// Zeros with probability `p`, the rest scaled by 1/(1 − p); `key [2]` are ids, see [`key`]. Dropouts with another
    /// `site` draw other masks.
    pub fn dropout(&mut self, x: Tensor, key: Tensor, p: f64, site: u32) -> Tensor {
        assert!((0.0..1.0).contains(&p), "a dropout of {p}");
        self.push(Dropout { p, site }, &[x, key])
    }
}

#[cfg(test)]
mod tests {
    use super::super::copy::tests::validated;
    use super::*;
    use crate::graph::cpu::{CpuProgram, CpuState};
    use crate::graph::testing::check_device_with;
    use crate::graph::tests::noise;

    /// Which of `n` elements stay.
    fn mask(n: usize, p: f64, site: u32, key: [u32; 2]) -> Vec<bool> {
        let mut g = Graph::new();
        let (x, k) = (g.state("x", [n]), g.input_ids("key", [2]));
        let y = g.dropout(x, k, p, site);
        let mut c = CpuProgram::<f64>::new(g, &[y]);
        c.set_ids("key", &key);
        c.run(&mut CpuState { values: [("x".into(), vec![1.0; n].into())].into() });
        c.read(y).iter().map(|v| *v != 0.0).collect()
    }

    #[test]
    fn shaders_validate() {
        validated(&Dropout { p: 0.3, site: 2 }, &[&[5, 7], &[2]]);
    }

    #[test]
    fn masks_are_fair_and_differ_by_key_and_site() {
        let n = 100_000;
        let sigma = |p: f64| (p * (1.0 - p) * n as f64).sqrt();
        for p in [0.0, 0.01, 0.3, 0.5, 0.9] {
            let m = mask(n, p, 0, key(1, 5, 0));
            let gone = m.iter().filter(|k| !**k).count() as f64;
            assert!((gone - p * n as f64).abs() <= 4.0 * sigma(p) + 0.5, "{p}: {gone}");
        }
        // two masks agree where both stay or both go, as often as independent ones do
        let a = mask(n, 0.5, 0, key(1, 5, 0));
        let others = [
            mask(n, 0.5, 1, key(1, 5, 0)),
            mask(n, 0.5, 2, key(1, 5, 0)),
            mask(n, 0.5, 0, key(1, 6, 0)),
            mask(n, 0.5, 0, key(2, 5, 0)),
            mask(n, 0.5, 0, key(1, 5, 1)),
            [&a[1..], &a[..1]].concat(),
            [&a[16..], &a[..16]].concat(),
        ];
        for (i, b) in others.iter().enumerate() {
            let equal = a.iter().zip(b).filter(|(x, y)| x == y).count() as f64;
            assert!((equal - 0.5 * n as f64).abs() <= 4.5 * sigma(0.5), "{i}: {equal}");
        }
        assert_eq!(a, mask(n, 0.5, 0, key(1, 5, 0)), "the same again");
        // pinned: the same bits on every machine and in every version
        let bits = mask(16, 0.5, 3, [1, 2]).iter().fold(0u32, |b, k| b << 1 | u32::from(*k));
        assert_eq!(bits, PINNED);
    }

    /// The first sixteen elements of a mask, the first on the left; computed by another program from the definition.
    const PINNED: u32 = 0b1000000001101010;

    /// The gradient of Σ w·dropout(x): central differences with the same key.
    #[test]
    fn the_derivative_has_the_same_mask() {
        let n = 40;
        let mut g = Graph::new();
        let (x, w, k) = (g.state("x", [5, 8]), g.state("w", [5, 8]), g.input_ids("key", [2]));
        let sq = g.mul(x, x);
        let y = g.dropout(sq, k, 0.4, 1);
        let y = g.mul(y, w);
        let loss = g.sum_all(y);
        let dx = g.gradients(loss, &[x])[0];
        let mut c = CpuProgram::<f64>::new(g, &[loss, dx]);
        c.set_ids("key", &key(3, 1, 0));
        let (x0, w0) = (noise(n, 1), noise(n, 2));
        let mut at = |x: &[f64]| {
            let values = [("x".into(), x.to_vec().into()), ("w".into(), w0.clone().into())].into();
            c.run(&mut CpuState { values });
            (c.read(loss)[0], c.read(dx))
        };
        let grad = at(&x0).1;
        let h = 1e-6;
        for i in 0..n {
            let mut moved = x0.clone();
            moved[i] += h;
            let up = at(&moved).0;
            moved[i] -= 2.0 * h;
            let slope = (up - at(&moved).0) / (2.0 * h);
            assert!((slope - grad[i]).abs() < 1e-8, "{i}: {slope} {}", grad[i]);
        }
        assert!(grad.iter().filter(|g| **g == 0.0).count() > 5);
    }

    /// The same elements stay on every executor, in place and not, whatever the number of elements.
    #[test]
    fn device() {
        for (n, d) in [(1, 1), (7, 9), (64, 64), (1000, 33)] {
            check_device_with(
                |g| {
                    let (x, k) = (g.state("x", [n, d]), g.input_ids("key", [2]));
                    let once = g.dropout(x, k, 0.25, 4);
                    let sq = g.mul(x, x);
                    let twice = g.dropout(sq, k, 0.5, 5);
                    let twice = g.dropout(twice, k, 0.1, 6);
                    vec![once, twice]
                },
                &[("key", key(9, 1000, 3).to_vec())],
                1.0,
                1e-6,
            );
        }
    }
}
