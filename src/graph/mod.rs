//! The graph, autodiff, passes, memory plan, and the two executors.
