//! What a kernel's text depends on, worked out once: the product in its simplest form, the layout of
//! each operand, the tile, the chunks of the sum.

use super::{Epilogue, Extra, MAX_EXTRAS, MatmulSpec, Params, Variant};

/// Shortest chunk of the sum worth a partial result of its own.
const MIN_CHUNK: u32 = 32;

/// A product ready to be written as WGSL.
pub(super) struct Plan {
    /// The product, simplified; the same memory as the caller's.
    pub spec: MatmulSpec,
    pub variant: Variant,
    /// Rows and columns an invocation computes.
    pub tm: u32,
    pub tn: u32,
    /// Chunks of the sum, and the length of each.
    pub split: u32,
    pub chunk: u32,
    /// The expression of the epilogue, `acc` when there is none.
    pub epilogue: String,
    pub extras: Vec<Extra>,
}

impl Plan {
    pub fn new(spec: &MatmulSpec, epilogue: Option<&Epilogue>, variant: Variant) -> Self {
        let sizes = [spec.batch, spec.m, spec.n, spec.k];
        assert!(sizes.iter().all(|&s| s > 0), "matrix product with an empty dimension: {spec:?}");
        let (epilogue, extras) = match epilogue {
            Some(e) => (e.wgsl.clone(), e.extras.clone()),
            None if spec.accumulate.is_some() => ("acc".into(), vec![Extra::Full]),
            None => ("acc".into(), Vec::new()),
        };
        assert!(extras.len() <= MAX_EXTRAS, "{} extra inputs, {MAX_EXTRAS} is the most", extras.len());
        if let Some(i) = spec.accumulate {
            assert!(i < extras.len(), "accumulate names extra {i} of {}", extras.len());
        }
        let spec = simplify(spec, &extras);
        assert!(variant.is_valid(), "no such variant: {variant:?}");
        let (tm, tn, want) = match variant {
            Variant::Naive => (1, 1, 1),
            Variant::Register { tm, tn, split, .. } => (tm, tn, split),
            Variant::Shared { tile, split } => (tile, tile, split),
        };
        let (split, chunk) = chunks(&spec, want);
        Self { spec, variant, tm, tn, split, chunk, epilogue, extras }
    }

    /// Elements of C.
    pub fn out_len(&self) -> u64 {
        self.spec.out_batch() as u64 * self.spec.m as u64 * self.spec.n as u64
    }

    /// Whether C's rows can be written four columns at a time.
    pub fn vec_out(&self) -> bool {
        self.spec.n.is_multiple_of(4) && self.tn.is_multiple_of(4)
    }

    /// Tiles down, across, and in all, for tiles of `rows × cols`.
    pub fn tiles(&self, rows: u32, cols: u32) -> (u32, u32, u64) {
        let (mt, nt) = (self.spec.m.div_ceil(rows), self.spec.n.div_ceil(cols));
        let all = mt as u64 * nt as u64 * self.spec.out_batch() as u64 * self.split as u64;
        (mt, nt, all)
    }

    /// Rows and columns of the unit that the grid counts: a workgroup's tile for the shared variant,
    /// an invocation's for the others.
    pub fn unit(&self) -> (u32, u32) {
        match self.variant {
            Variant::Shared { .. } => (64, 64),
            _ => (self.tm, self.tn),
        }
    }

    /// The uniform block.
    pub fn params(&self) -> Params {
        let s = &self.spec;
        let (rows, cols) = self.unit();
        let (mt, nt, tiles) = self.tiles(rows, cols);
        let mut strides = [[0; 4]; MAX_EXTRAS];
        for (slot, extra) in strides.iter_mut().zip(&self.extras) {
            if let Extra::Strided { batch, row, col } = *extra {
                *slot = [batch, row, col, 0];
            }
        }
        Params {
            m: s.m,
            n: s.n,
            k: s.k,
            batch: s.out_batch(),
            mt,
            nt,
            tiles: u32::try_from(tiles).expect("fewer tiles than 2^32: C is under 2^32 elements"),
            split: self.split,
            chunk: self.chunk,
            stride_a: if s.a_batched { s.m * s.k } else { 0 },
            stride_b: if s.b_batched { s.k * s.n } else { 0 },
            sum_batch: if s.reduce_batch { s.batch } else { 1 },
            strides,
        }
    }
}

/// The same product over the same memory, in the form with the longest rows and fewest batches.
fn simplify(spec: &MatmulSpec, extras: &[Extra]) -> MatmulSpec {
    let mut s = *spec;
    if s.batch == 1 {
        s.reduce_batch = false;
    }
    // Σ_b A[b]ᵀ·B[b] with k outermost in both is one long sum over (b, k).
    let k_outer = (s.trans_a || s.m == 1) && (!s.trans_b || s.n == 1);
    if s.reduce_batch && s.a_batched && s.b_batched && k_outer {
        s.k *= s.batch;
        s.batch = 1;
        s.reduce_batch = false;
    }
    // Rows of all A[b] against one B are the rows of one product.
    let foldable = extras.iter().all(|x| match *x {
        Extra::Strided { batch, row, .. } => batch == row * s.m,
        _ => true,
    });
    let rows_outer = !s.trans_a || s.k == 1;
    if s.batch > 1 && !s.reduce_batch && s.a_batched && !s.b_batched && rows_outer && foldable {
        s.m *= s.batch;
        s.batch = 1;
    }
    if s.batch == 1 {
        s.a_batched = false;
        s.b_batched = false;
        s.reduce_batch = false;
    }
    // A vector may be read either way: choose k (or, where k is 1, the other) as the inner dimension.
    if s.m == 1 {
        s.trans_a = false;
    } else if s.k == 1 {
        s.trans_a = true;
    }
    if s.n == 1 {
        s.trans_b = true;
    } else if s.k == 1 {
        s.trans_b = false;
    }
    s
}

/// Number of chunks of the sum, at most `want`, none empty, and the length of each: products when the
/// batch is summed over, else a multiple of 16 steps of k (so that vector loads stay aligned).
fn chunks(spec: &MatmulSpec, want: u32) -> (u32, u32) {
    let (total, unit) = if spec.reduce_batch { (spec.batch, 1) } else { (spec.k, 16) };
    let least = if spec.reduce_batch { MIN_CHUNK.div_ceil(spec.k) } else { MIN_CHUNK };
    let chunk = total.div_ceil(want.max(1)).max(least).next_multiple_of(unit);
    (total.div_ceil(chunk), chunk)
}
