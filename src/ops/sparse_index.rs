//! The batch's ids in sorted order, made by the host: what lets the gradient of an embedding table be
//! summed without atomics, one writer a unique row.

use super::embedding::Pool;

/// For `N` positions of ids (`N` is the static capacity): see the fields. All have lengths that depend on
/// `N` only, so they are uploaded as graph inputs of fixed shape.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SparseIndex {
    /// `[N]`: for each sorted position the row of the gathered output that its occurrence went to. 0 beyond
    /// the last occurrence.
    pub order: Vec<u32>,
    /// `[N + 1]`: segment `u` is sorted positions `segments[u] .. segments[u + 1]`: the occurrences of one id.
    /// Entries past the last unique id are equal to the end, so their segments are empty.
    pub segments: Vec<u32>,
    /// `[N]`: table row of each segment, ascending; padded with `u32::MAX`.
    pub unique: Vec<u32>,
    /// `[N]`: factor of each sorted position (1/length of its bag for a mean, times its weight); 0 in padding.
    pub scale: Vec<f32>,
    keys: Vec<u64>,
    rows: Vec<u32>,
    factors: Vec<f32>,
}

impl SparseIndex {
    /// For `gather`: occurrence `p` of the ids is output row `p`.
    pub fn plain(ids: &[u32]) -> Self {
        let mut s = Self::default();
        s.set_plain(ids);
        s
    }

    /// For `pooled_gather`: bag `r` holds `ids[offsets[r] .. offsets[r + 1]]`; what lies beyond is padding.
    pub fn bags(ids: &[u32], offsets: &[u32], weights: Option<&[f32]>, pool: Pool) -> Self {
        let mut s = Self::default();
        s.set_bags(ids, offsets, weights, pool);
        s
    }

    /// [`SparseIndex::plain`], reusing the buffers.
    pub fn set_plain(&mut self, ids: &[u32]) {
        self.keys.clear();
        self.keys.extend(ids.iter().enumerate().map(|(p, &id)| (id as u64) << 32 | p as u64));
        self.fill(ids.len(), |p| (p, 1.0));
    }

    /// [`SparseIndex::bags`], reusing the buffers.
    pub fn set_bags(&mut self, ids: &[u32], offsets: &[u32], weights: Option<&[f32]>, pool: Pool) {
        let mut rows = std::mem::take(&mut self.rows);
        let mut factors = std::mem::take(&mut self.factors);
        self.keys.clear();
        rows.clear();
        factors.clear();
        rows.resize(ids.len(), 0);
        factors.resize(ids.len(), 0.0);
        for (r, w) in offsets.windows(2).enumerate() {
            let len = w[1] - w[0];
            for p in w[0]..w[1] {
                let i = p as usize;
                self.keys.push((ids[i] as u64) << 32 | p as u64);
                rows[i] = r as u32;
                factors[i] = match pool {
                    Pool::Sum => 1.0,
                    Pool::Mean => 1.0 / len as f32,
                } * weights.map_or(1.0, |w| w[i]);
            }
        }
        self.fill(ids.len(), |p| (rows[p as usize], factors[p as usize]));
        self.rows = rows;
        self.factors = factors;
    }

    fn fill(&mut self, n: usize, of: impl Fn(u32) -> (u32, f32)) {
        // equal ids stay in order of occurrence: the sum is the same in every run
        self.keys.sort_unstable();
        self.order.clear();
        self.scale.clear();
        self.segments.clear();
        self.unique.clear();
        for (at, key) in self.keys.iter().enumerate() {
            let id = (key >> 32) as u32;
            if self.unique.last() != Some(&id) {
                self.unique.push(id);
                self.segments.push(at as u32);
            }
            let (row, factor) = of(*key as u32);
            self.order.push(row);
            self.scale.push(factor);
        }
        self.segments.resize(n + 1, self.keys.len() as u32);
        self.order.resize(n, 0);
        self.scale.resize(n, 0.0);
        self.unique.resize(n, u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_ids() {
        let s = SparseIndex::plain(&[7, 2, 7, 0]);
        assert_eq!(s.order, [3, 1, 0, 2]);
        assert_eq!(s.segments, [0, 1, 2, 4, 4]);
        assert_eq!(s.unique, [0, 2, 7, u32::MAX]);
    }

    #[test]
    fn bags_with_padding() {
        let s = SparseIndex::bags(&[5, 1, 5, 9, 9], &[0, 2, 2, 3], None, Pool::Mean);
        assert_eq!(s.order, [0, 0, 2, 0, 0]);
        assert_eq!(s.segments, [0, 1, 3, 3, 3, 3]);
        assert_eq!(s.unique, [1, 5, u32::MAX, u32::MAX, u32::MAX]);
        assert_eq!(s.scale, [0.5, 0.5, 1.0, 0.0, 0.0]);
        let w = SparseIndex::bags(&[5, 1, 5], &[0, 2, 2, 3], Some(&[2.0, 3.0, 4.0]), Pool::Sum);
        assert_eq!(w.scale, [3.0, 2.0, 4.0]);
    }
}
