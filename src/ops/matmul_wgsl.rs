//! stub
/// C[b] = epilogue(op(A[b]) · op(B[b])).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MatmulSpec {
    /// b
    pub batch: u32,
    /// rows
    pub m: u32,
    /// columns
    pub n: u32,
    /// depth
    pub k: u32,
    /// A stored [k, m]
    pub trans_a: bool,
    /// B stored [n, k]
    pub trans_b: bool,
    /// A has a batch axis
    pub a_batched: bool,
    /// B has a batch axis
    pub b_batched: bool,
    /// sum over the batch
    pub reduce_batch: bool,
    /// extras index added
    pub accumulate: Option<usize>,
}
/// variant
#[derive(Clone, Copy, Debug)]
pub enum Variant {
    /// x
    Naive,
}
