//! Square mixing matrices `M[o, i]` (row o: output stream) and what is measured of them.
//!
//! Gains are those of the mHC paper (its Figures 3 and 7): signed sums first, then the absolute value. For a
//! matrix with negative entries this is not the matrix's ∞-norm, which sums absolute values.

use std::ops::Mul;

/// A row-major n × n matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    n: usize,
    m: Vec<f64>,
}

impl Matrix {
    /// From n² numbers, row by row.
    ///
    /// # Panics
    /// If there are not n².
    pub fn new(n: usize, m: Vec<f64>) -> Self {
        assert_eq!(m.len(), n * n, "an {n} × {n} matrix");
        Matrix { n, m }
    }

    /// From f32.
    ///
    /// # Panics
    /// If there are not n² numbers.
    pub fn from_f32(n: usize, m: &[f32]) -> Self {
        Self::new(n, m.iter().map(|&x| f64::from(x)).collect())
    }

    /// The identity.
    pub fn identity(n: usize) -> Self {
        Self::new(n, (0..n * n).map(|k| if k / n == k % n { 1.0 } else { 0.0 }).collect())
    }

    /// Zeros.
    pub fn zeros(n: usize) -> Self {
        Self::new(n, vec![0.0; n * n])
    }

    /// Rows (and columns).
    pub fn n(&self) -> usize {
        self.n
    }

    /// The elements, row by row.
    pub fn data(&self) -> &[f64] {
        &self.m
    }

    /// M[o, i].
    pub fn at(&self, o: usize, i: usize) -> f64 {
        self.m[o * self.n + i]
    }

    /// Adds `k` times another.
    pub fn add_scaled(&mut self, other: &Matrix, k: f64) {
        for (a, b) in self.m.iter_mut().zip(&other.m) {
            *a += k * b;
        }
    }

    /// Σ_i M[o, i] for each o.
    pub fn row_sums(&self) -> Vec<f64> {
        self.m.chunks(self.n).map(|r| r.iter().sum()).collect()
    }

    /// Σ_o M[o, i] for each i.
    pub fn col_sums(&self) -> Vec<f64> {
        (0..self.n).map(|i| (0..self.n).map(|o| self.at(o, i)).sum()).collect()
    }

    /// max_o |Σ_i M[o, i]|: how much the forward signal can grow.
    pub fn forward_gain(&self) -> f64 {
        forward_gain(self.n, &self.m)
    }

    /// max_i |Σ_o M[o, i]|: how much the gradient can grow.
    pub fn backward_gain(&self) -> f64 {
        backward_gain(self.n, &self.m)
    }

    /// Mean over rows of −Σ_i p ln p with p = |M[o, i]| / Σ_i |M[o, i]|, in nats: 0 where each output copies
    /// one stream, ln n where it averages all. A row of zeros counts 0.
    pub fn row_entropy(&self) -> f64 {
        let row = |r: &[f64]| {
            let s: f64 = r.iter().map(|x| x.abs()).sum();
            let term = |x: &f64| {
                let p = x.abs() / s;
                if p > 0.0 { -p * p.ln() } else { 0.0 }
            };
            if s > 0.0 { r.iter().map(term).sum() } else { 0.0 }
        };
        self.m.chunks(self.n).map(row).sum::<f64>() / self.n as f64
    }

    /// Singular values, the largest first (roots of the eigenvalues of MᵀM, by Jacobi rotations).
    pub fn singular_values(&self) -> Vec<f64> {
        let n = self.n;
        // One-sided Jacobi: rotate pairs of columns until all are orthogonal; their lengths are the values.
        let mut c: Vec<Vec<f64>> = (0..n).map(|i| (0..n).map(|o| self.at(o, i)).collect()).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        for _ in 0..60 {
            let mut turned = false;
            for p in 0..n {
                for q in p + 1..n {
                    let (a, b, g) = (dot(&c[p], &c[p]), dot(&c[q], &c[q]), dot(&c[p], &c[q]));
                    // NaN compares false: such a matrix is left as it is
                    if g.abs() > 1e-15 * (a * b).sqrt() && g.abs() > f64::MIN_POSITIVE {
                        turned = true;
                        let zeta = (b - a) / (2.0 * g);
                        let t = zeta.signum() / (zeta.abs() + (1.0 + zeta * zeta).sqrt());
                        let t = if zeta == 0.0 { 1.0 } else { t };
                        let cos = 1.0 / (1.0 + t * t).sqrt();
                        let sin = cos * t;
                        let (head, tail) = c.split_at_mut(q);
                        for (x, y) in head[p].iter_mut().zip(&mut tail[0]) {
                            (*x, *y) = (cos * *x - sin * *y, sin * *x + cos * *y);
                        }
                    }
                }
            }
            if !turned {
                break;
            }
        }
        let mut s: Vec<f64> = c.iter().map(|v| dot(v, v).sqrt()).collect();
        s.sort_by(|a, b| b.total_cmp(a));
        s
    }

    /// The second largest singular value, 0 for n = 1: how much of the differences between streams survives
    /// (a doubly stochastic matrix has 1 as its largest).
    pub fn second_singular(&self) -> f64 {
        self.singular_values().get(1).copied().unwrap_or(0.0)
    }
}

/// [`Matrix::forward_gain`] of n² numbers.
pub(super) fn forward_gain(n: usize, m: &[f64]) -> f64 {
    m.chunks_exact(n).fold(0.0, |g: f64, r| g.max(r.iter().sum::<f64>().abs()))
}

/// [`Matrix::backward_gain`] of n² numbers.
pub(super) fn backward_gain(n: usize, m: &[f64]) -> f64 {
    (0..n).fold(0.0, |g: f64, i| g.max(m[i..].iter().step_by(n).sum::<f64>().abs()))
}

impl Mul for &Matrix {
    type Output = Matrix;

    fn mul(self, b: &Matrix) -> Matrix {
        let n = self.n;
        assert_eq!(n, b.n, "matrices of one size");
        let mut m = vec![0.0; n * n];
        for o in 0..n {
            for k in 0..n {
                let a = self.m[o * n + k];
                for i in 0..n {
                    m[o * n + i] += a * b.m[k * n + i];
                }
            }
        }
        Matrix { n, m }
    }
}

/// Composites M_b ⋯ M_a of all 0 ≤ a ≤ b < L, later layers on the left: `c[a][b - a]`.
pub fn composites(layers: &[Matrix]) -> Vec<Vec<Matrix>> {
    (0..layers.len())
        .map(|a| {
            let mut row = vec![layers[a].clone()];
            for m in &layers[a + 1..] {
                row.push(m * &row[row.len() - 1]);
            }
            row
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_layers_stand_on_the_left() {
        let a = Matrix::new(2, vec![1.0, 2.0, 0.0, 1.0]);
        let b = Matrix::new(2, vec![1.0, 0.0, 3.0, 1.0]);
        let c = composites(&[a.clone(), b.clone()]);
        assert_eq!(c[0][1], &b * &a);
        assert_ne!(c[0][1], &a * &b);
        assert_eq!(c[0][1].data(), [1.0, 2.0, 3.0, 7.0]);
        assert_eq!((c[0].len(), c[1].len()), (2, 1));
    }

    #[test]
    fn gains_sum_before_they_take_the_absolute_value() {
        let m = Matrix::new(2, vec![1.0, -1.0, 0.5, -2.0]);
        assert_eq!(m.forward_gain(), 1.5);
        assert_eq!(m.backward_gain(), 3.0);
    }

    #[test]
    fn singular_values_of_known_matrices() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        let m = Matrix::new(2, vec![3.0, 0.0, 4.0, 5.0]); // √45, √5
        close(m.singular_values()[0], 45f64.sqrt());
        close(m.second_singular(), 5f64.sqrt());
        // (1 − w) I + w J/n: 1, then 1 − w
        let (n, w) = (4, 0.3);
        let m = Matrix::new(
            n,
            (0..n * n).map(|k| w / 4.0 + if k / n == k % n { 1.0 - w } else { 0.0 }).collect(),
        );
        close(m.singular_values()[0], 1.0);
        close(m.second_singular(), 0.7);
        assert_eq!(Matrix::identity(1).second_singular(), 0.0);
        close(Matrix::identity(3).second_singular(), 1.0);
        close(Matrix::new(2, vec![0.25; 4]).second_singular(), 0.0);
    }

    #[test]
    fn entropy_of_copies_and_of_averages() {
        assert_eq!(Matrix::identity(3).row_entropy(), 0.0);
        assert!((Matrix::new(3, vec![-0.2; 9]).row_entropy() - 3f64.ln()).abs() < 1e-12);
        assert_eq!(Matrix::zeros(2).row_entropy(), 0.0);
    }
}
