//! The small product that interactions within one example are made of, for the CPU: `I` rows of A times a
//! panel of sixteen columns of B, kept in registers. Products of whole batches go to the `gemm` crate; these
//! are too small for it.

use super::Real;

/// Columns of a panel.
pub(crate) const LANES: usize = 16;

/// `n` rounded up to whole panels.
pub(crate) fn padded(n: usize) -> usize {
    n.next_multiple_of(LANES)
}

/// `out[i][l] = Σ_k a[i·lda + k] · b[k·ldb + l]` for `k < depth`; `b` starts at the panel's first column.
#[inline(always)]
pub(crate) fn panel<T: Real, const I: usize>(
    a: &[T],
    lda: usize,
    depth: usize,
    b: &[T],
    ldb: usize,
) -> [[T; LANES]; I] {
    let mut acc = [[T::ZERO; LANES]; I];
    let rows: [&[T]; I] = std::array::from_fn(|i| &a[i * lda..i * lda + depth]);
    for (k, b) in b.chunks(ldb).take(depth).enumerate() {
        let b: &[T; LANES] = b.first_chunk().expect("panels are padded");
        for i in 0..I {
            let a = rows[i][k];
            for l in 0..LANES {
                acc[i][l] += a * b[l];
            }
        }
    }
    acc
}
