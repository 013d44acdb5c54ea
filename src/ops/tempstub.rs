//! Stream operations as compositions, until the fused ones land.
use crate::graph::{Graph, Tensor};
use crate::ops::matmul::Trans;
impl Graph {
    /// `S[T, n, d]`, `phi[n·d, 2n + n²]` → pre, post, res projections and the mean square.
    pub fn mhc_project(&mut self, s: Tensor, p: Tensor) -> (Tensor, Tensor, Tensor, Tensor) {
        let (t, n, d) = (s.dim(0), s.dim(1), s.dim(2));
        let v = s.reshaped([t, n * d]);
        let raw = self.matmul(v, p);
        let sq = self.mul(v, v);
        let ms = self.reduce_sum(sq, t, n * d, 1, [t, 1]);
        let ms = self.affine(ms, 1.0 / (n * d) as f64, 0.0);
        let a = self.slice(raw, 1, 0, n);
        let b = self.slice(raw, 1, n, n);
        let c = self.slice(raw, 1, 2 * n, n * n);
        (a, b, c, ms)
    }
    /// Σ_i pre[i] S[i]
    pub fn stream_aggregate(&mut self, s: Tensor, p: Tensor) -> Tensor {
        let (t, n, d) = (s.dim(0), s.dim(1), s.dim(2));
        self.matmul_t(p.reshaped([t, 1, n]), s, Trans::default()).reshaped([t, d])
    }
    /// Σ_i res[o, i] S[i] + post[o] f
    pub fn stream_merge(&mut self, s: Tensor, f: Tensor, r: Tensor, p: Tensor) -> Tensor {
        let (t, n, d) = (s.dim(0), s.dim(1), s.dim(2));
        let m = self.matmul(r, s);
        let q = self.mul(p.reshaped([t, n, 1]), f.reshaped([t, 1, d]));
        self.add(m, q)
    }
}
