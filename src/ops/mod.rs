//! One file per operation: contract, shape rule, cost, vjp, CPU implementation, shader launch.

pub mod matmul_tune;
pub mod matmul_wgsl;
