//! temp
use crate::graph::{Graph,Tensor};
impl Graph {
    /// t
    pub fn sinkhorn(&mut self, _h: Tensor, _i: usize) -> Tensor { unimplemented!() }
    /// t
    pub fn mhc_project(&mut self, _s: Tensor, _p: Tensor) -> (Tensor, Tensor, Tensor, Tensor) { unimplemented!() }
    /// t
    pub fn stream_aggregate(&mut self, _s: Tensor, _p: Tensor) -> Tensor { unimplemented!() }
    /// t
    pub fn stream_merge(&mut self, _s: Tensor, _p: Tensor, _r: Tensor, _q: Tensor) -> Tensor { unimplemented!() }
}
