//! From the coefficients of every token to the records of a diagnosis.

use super::matrix::{Matrix, backward_gain, forward_gain};
use crate::par::*;

/// Most tokens whose spectra are taken (evenly spaced): a Jacobi iteration each is the dearest part.
const SPECTRA: usize = 256;
/// Tokens a task, a fixed number, so that sums do not depend on the number of threads.
const TASK: usize = 128;

/// The residual matrices of one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerRes<'a> {
    /// `[tokens, n, n]`; `None` is the identity for all (an ablation, or one stream).
    pub res: Option<&'a [f32]>,
    /// Whether the layer changes the slot count: composites end with it.
    pub changes_slots: bool,
}

/// What a stack's residual matrices are like.
#[derive(Clone, Debug, Default)]
pub struct ResidualReport {
    /// Layer by layer.
    pub layers: Vec<ResidualStats>,
    /// Token-averaged composites of all pairs a ≤ b, packed as in [`super::snapshot::pair_index`]; NaN where
    /// a and b are in different segments.
    pub composites: Vec<f64>,
    /// See [`super::Record`].
    pub forward: Vec<f64>,
    /// See [`super::Record`].
    pub backward: Vec<f64>,
    /// See [`super::Record`].
    pub token_forward: Vec<f64>,
    /// See [`super::Record`].
    pub token_backward: Vec<f64>,
}

/// One layer's residual matrices.
#[derive(Clone, Debug)]
pub struct ResidualStats {
    /// The token average.
    pub average: Matrix,
    /// Means over tokens of each one's gains.
    pub token_gain: (f64, f64),
    /// Least and greatest row sum of any token.
    pub row_sums: (f64, f64),
    /// Least and greatest column sum of any token.
    pub col_sums: (f64, f64),
    /// Mean second singular value.
    pub second_singular: f64,
    /// Mean row entropy.
    pub row_entropy: f64,
}

/// Stretches of layers between which the slot count does not change: (first, last).
pub fn segments(layers: &[LayerRes<'_>]) -> Vec<(usize, usize)> {
    let mut out = vec![];
    let mut first = 0;
    for (l, s) in layers.iter().enumerate() {
        if s.changes_slots || l + 1 == layers.len() {
            out.push((first, l));
            first = l + 1;
        }
    }
    out
}

/// Measures a stack. `n` streams.
///
/// # Panics
/// If the layers of one segment have different token counts.
pub fn residual(n: usize, layers: &[LayerRes<'_>]) -> ResidualReport {
    let count = layers.len();
    let mut report = ResidualReport {
        layers: layers.iter().map(|l| layer(n, l.res)).collect(),
        composites: vec![f64::NAN; count * (count + 1) / 2 * n * n],
        forward: vec![1.0; count],
        backward: vec![1.0; count],
        token_forward: vec![1.0; count],
        token_backward: vec![1.0; count],
    };
    for (first, last) in segments(layers) {
        segment(n, &layers[first..=last], count, first, &mut report);
    }
    report
}

fn layer(n: usize, res: Option<&[f32]>) -> ResidualStats {
    let eye: Vec<f32> = Matrix::identity(n).data().iter().map(|&x| x as f32).collect();
    let res = res.unwrap_or(&eye);
    let k = n * n;
    let tokens = res.len() / k;
    let mut average = Matrix::zeros(n);
    let (mut rows, mut cols) = ((f64::INFINITY, f64::NEG_INFINITY), (f64::INFINITY, f64::NEG_INFINITY));
    let (mut forward, mut backward) = (0.0, 0.0);
    let widen = |r: &mut (f64, f64), sums: &[f64]| {
        for &s in sums {
            *r = (r.0.min(s), r.1.max(s));
        }
        sums.iter().fold(0.0f64, |a, s| a.max(s.abs()))
    };
    for m in res.chunks_exact(k) {
        let m = Matrix::from_f32(n, m);
        forward += widen(&mut rows, &m.row_sums());
        backward += widen(&mut cols, &m.col_sums());
        average.add_scaled(&m, 1.0 / tokens as f64);
    }
    let stride = tokens.div_ceil(SPECTRA).max(1);
    let sample: Vec<&[f32]> = res.chunks_exact(k).step_by(stride).collect();
    let spectra: Vec<(f64, f64)> = sample
        .par_iter()
        .map(|m| {
            let m = Matrix::from_f32(n, m);
            (m.second_singular(), m.row_entropy())
        })
        .collect();
    let mean = |f: fn(&(f64, f64)) -> f64| spectra.iter().map(f).sum::<f64>() / spectra.len() as f64;
    ResidualStats {
        average,
        token_gain: (forward / tokens as f64, backward / tokens as f64),
        row_sums: rows,
        col_sums: cols,
        second_singular: mean(|s| s.0),
        row_entropy: mean(|s| s.1),
    }
}

/// Sums over tokens of a segment of `len` layers.
struct Sums {
    /// All pairs of the segment, packed.
    composites: Vec<f64>,
    forward: Vec<f64>,
    backward: Vec<f64>,
}

fn segment(n: usize, layers: &[LayerRes<'_>], count: usize, first: usize, report: &mut ResidualReport) {
    let (k, len) = (n * n, layers.len());
    let eye: Vec<f32> = Matrix::identity(n).data().iter().map(|&x| x as f32).collect();
    let tokens = layers.iter().filter_map(|l| l.res).map(|r| r.len() / k).max().unwrap_or(1);
    for r in layers.iter().filter_map(|l| l.res) {
        assert_eq!(r.len(), tokens * k, "the layers of a segment share their tokens");
    }
    let at = |l: usize, t: usize| layers[l].res.map_or(&eye[..], |r| &r[t * k..][..k]);
    let parts: Vec<Sums> = (0..tokens.div_ceil(TASK))
        .into_par_iter()
        .map(|task| {
            let mut s = Sums {
                composites: vec![0.0; len * (len + 1) / 2 * k],
                forward: vec![0.0; len],
                backward: vec![0.0; len],
            };
            let (mut p, mut q) = (vec![0.0; k], vec![0.0; k]);
            for t in task * TASK..((task + 1) * TASK).min(tokens) {
                let mut pair = 0;
                for a in 0..len {
                    for (p, x) in p.iter_mut().zip(at(a, t)) {
                        *p = f64::from(*x);
                    }
                    for b in a..len {
                        if b > a {
                            product(n, at(b, t), &p, &mut q);
                            std::mem::swap(&mut p, &mut q);
                        }
                        for (c, x) in s.composites[pair * k..][..k].iter_mut().zip(&p) {
                            *c += x;
                        }
                        pair += 1;
                        if a == 0 {
                            s.forward[b] += forward_gain(n, &p);
                        }
                        if b + 1 == len {
                            s.backward[a] += backward_gain(n, &p);
                        }
                    }
                }
            }
            s
        })
        .collect();
    let mut total = vec![0.0; len * (len + 1) / 2 * k];
    for s in &parts {
        add(&mut total, &s.composites, 1.0 / tokens as f64);
    }
    let (mut forward, mut backward) = (vec![0.0; len], vec![0.0; len]);
    for s in &parts {
        add(&mut forward, &s.forward, 1.0 / tokens as f64);
        add(&mut backward, &s.backward, 1.0 / tokens as f64);
    }
    let mut pair = 0;
    for a in 0..len {
        for b in a..len {
            let m = &total[pair * k..][..k];
            let to = super::snapshot::pair_index(count, first + a, first + b) * k;
            report.composites[to..to + k].copy_from_slice(m);
            if a == 0 {
                report.forward[first + b] = forward_gain(n, m);
            }
            if b + 1 == len {
                report.backward[first + a] = backward_gain(n, m);
            }
            pair += 1;
        }
    }
    report.token_forward[first..first + len].copy_from_slice(&forward);
    report.token_backward[first..first + len].copy_from_slice(&backward);
}

fn add(to: &mut [f64], from: &[f64], k: f64) {
    for (a, b) in to.iter_mut().zip(from) {
        *a += k * b;
    }
}

/// q = m·p
fn product(n: usize, m: &[f32], p: &[f64], q: &mut [f64]) {
    for (row, out) in m.chunks_exact(n).zip(q.chunks_exact_mut(n)) {
        out.fill(0.0);
        for (x, from) in row.iter().zip(p.chunks_exact(n)) {
            let x = f64::from(*x);
            for (o, f) in out.iter_mut().zip(from) {
                *o += x * f;
            }
        }
    }
}

/// Mean over tokens of `values[tokens, width]`.
pub fn token_average(width: usize, values: &[f32]) -> Vec<f32> {
    let mut sum = vec![0.0f64; width];
    for row in values.chunks_exact(width) {
        for (s, x) in sum.iter_mut().zip(row) {
            *s += f64::from(*x);
        }
    }
    let tokens = (values.len() / width).max(1) as f64;
    sum.iter().map(|s| (s / tokens) as f32).collect()
}

/// From each token's Gram matrix of its streams, `[tokens, n, n]`: the mean cosine over pairs and tokens (1 for
/// one stream; a pair with a zero stream counts 0), and the root mean square of an element (`d` of them a stream).
pub fn streams(n: usize, d: usize, gram: &[f32]) -> (f64, f64) {
    let (mut cosine, mut square) = (0.0, 0.0);
    for g in gram.chunks_exact(n * n) {
        for i in 0..n {
            square += f64::from(g[i * n + i]);
            for j in i + 1..n {
                let scale = (f64::from(g[i * n + i]) * f64::from(g[j * n + j])).sqrt();
                if scale > 0.0 {
                    cosine += f64::from(g[i * n + j]) / scale;
                }
            }
        }
    }
    let tokens = (gram.len() / (n * n)).max(1) as f64;
    let pairs = (n * (n - 1) / 2) as f64;
    let cosine = if n == 1 { 1.0 } else { cosine / (pairs * tokens) };
    (cosine, (square / (tokens * (n * d) as f64)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::snapshot::pair_index;

    /// Two tokens, three layers of 2 × 2, all different.
    fn sample() -> Vec<Vec<f32>> {
        (0..3).map(|l| (0..8).map(|i| ((l * 8 + i) * 7 % 11) as f32 / 5.0 - 1.0).collect()).collect()
    }

    #[test]
    fn composites_are_averaged_after_they_are_multiplied() {
        let res = sample();
        let layers: Vec<LayerRes<'_>> =
            res.iter().map(|r| LayerRes { res: Some(r), changes_slots: false }).collect();
        let r = residual(2, &layers);
        let token = |l: usize, t: usize| Matrix::from_f32(2, &res[l][t * 4..][..4]);
        for (a, b) in [(0, 0), (0, 1), (0, 2), (1, 2), (2, 2)] {
            let mut want = Matrix::zeros(2);
            let (mut forward, mut backward) = (0.0, 0.0);
            for t in 0..2 {
                let m = (a + 1..=b).fold(token(a, t), |m, l| &token(l, t) * &m);
                forward += m.forward_gain() / 2.0;
                backward += m.backward_gain() / 2.0;
                want.add_scaled(&m, 0.5);
            }
            let got = &r.composites[pair_index(3, a, b) * 4..][..4];
            for (x, y) in got.iter().zip(want.data()) {
                assert!((x - y).abs() < 1e-12, "{a} {b}");
            }
            if a == 0 {
                assert!((r.forward[b] - want.forward_gain()).abs() < 1e-12);
                assert!((r.token_forward[b] - forward).abs() < 1e-12);
            }
            if b == 2 {
                assert!((r.backward[a] - want.backward_gain()).abs() < 1e-12);
                assert!((r.token_backward[a] - backward).abs() < 1e-12);
            }
        }
        // the mean of products is not the product of means
        let mean = |l: usize| r.layers[l].average.clone();
        let product = &mean(1) * &mean(0);
        let got = &r.composites[pair_index(3, 0, 1) * 4..][..4];
        assert!(got.iter().zip(product.data()).any(|(x, y)| (x - y).abs() > 1e-3));
    }

    #[test]
    fn a_change_of_slots_ends_a_composite() {
        let res = sample();
        let more: Vec<f32> = res[2].iter().chain(&res[1]).copied().collect();
        let layers = [
            LayerRes { res: Some(&res[0]), changes_slots: false },
            LayerRes { res: Some(&res[1]), changes_slots: true },
            LayerRes { res: Some(&more), changes_slots: false },
        ];
        assert_eq!(segments(&layers), [(0, 1), (2, 2)]);
        let r = residual(2, &layers);
        assert!(r.composites[pair_index(3, 1, 2) * 4].is_nan());
        assert!(r.composites[pair_index(3, 0, 2) * 4].is_nan());
        assert!(!r.composites[pair_index(3, 0, 1) * 4].is_nan());
        assert!((r.forward[2] - r.layers[2].average.forward_gain()).abs() < 1e-12);
    }

    #[test]
    fn fixed_matrices_are_identities() {
        let r = residual(3, &[LayerRes { res: None, changes_slots: false }; 2]);
        assert_eq!((r.forward[1], r.backward[0]), (1.0, 1.0));
        assert_eq!(r.layers[0].second_singular, 1.0);
    }

    #[test]
    fn similar_and_different_streams() {
        // two tokens of two streams, d = 2: equal; orthogonal
        let gram = [2.0, 2.0, 2.0, 2.0, 1.0, 0.0, 0.0, 4.0];
        let (cosine, rms) = streams(2, 2, &gram);
        assert!((cosine - 0.5).abs() < 1e-12);
        assert!((rms - (9.0f64 / 8.0).sqrt()).abs() < 1e-12);
        assert_eq!(streams(1, 1, &[4.0]), (1.0, 2.0));
    }
}
