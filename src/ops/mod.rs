//! One file per operation: contract, shape rule, cost, vjp, CPU implementation, shader launch.
