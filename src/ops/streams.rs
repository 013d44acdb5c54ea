//! What the operations on residual streams share: the dispatch on the number of streams `n` (1 to 8, a
//! constant in the inner loops), and the unrolling of shader templates over it.

use pulp::Simd;
use std::fmt::Write;

/// The most residual streams that the operations support.
pub const MAX_STREAMS: usize = 8;

/// Most streams for which the CPU has code of their own, several values at once: a page's module has to stay small.
pub const FAST_STREAMS: usize = if cfg!(target_arch = "wasm32") { 4 } else { MAX_STREAMS };

/// Calls `$f::<N>(…)` with the constant `N` equal to `$n`, which in a page is [`FAST_STREAMS`] at most.
#[macro_export]
macro_rules! by_streams {
    ($n:expr, $($f:ident)::+ ($($a:expr),* $(,)?)) => {
        match $n {
            1 => $($f)::+::<1>($($a),*),
            2 => $($f)::+::<2>($($a),*),
            3 => $($f)::+::<3>($($a),*),
            4 => $($f)::+::<4>($($a),*),
            #[cfg(not(target_arch = "wasm32"))]
            5 => $($f)::+::<5>($($a),*),
            #[cfg(not(target_arch = "wasm32"))]
            6 => $($f)::+::<6>($($a),*),
            #[cfg(not(target_arch = "wasm32"))]
            7 => $($f)::+::<7>($($a),*),
            #[cfg(not(target_arch = "wasm32"))]
            8 => $($f)::+::<8>($($a),*),
            n => unreachable!("the shape rule allows 1 to 8 streams, not {n}"),
        }
    };
}

/// `x` as `N` consecutive rows of equal length.
#[inline(always)]
pub fn split<const N: usize>(x: &[f32]) -> [&[f32]; N] {
    let d = x.len() / N;
    let mut rows = [x; N];
    for (i, r) in rows.iter_mut().enumerate() {
        *r = &x[i * d..(i + 1) * d];
    }
    rows
}

/// The vector that starts at element `at`; with `FULL` it is known to be there, else the row may end in it.
#[inline(always)]
pub fn load<S: Simd, const FULL: bool>(simd: S, x: &[f32], at: usize) -> S::f32s {
    if FULL { S::as_simd_f32s(&x[at..at + S::F32_LANES]).0[0] } else { simd.partial_load_f32s(&x[at..]) }
}

/// Writes what [`load`] reads.
#[inline(always)]
pub fn store<S: Simd, const FULL: bool>(simd: S, y: &mut [f32], at: usize, v: S::f32s) {
    if FULL {
        S::as_mut_simd_f32s(&mut y[at..at + S::F32_LANES]).0[0] = v;
    } else {
        simd.partial_store_f32s(&mut y[at..], v);
    }
}

/// Tokens of one task: a fixed number, so that results do not depend on the number of threads.
pub const TOKENS_PER_TASK: usize = 256;

/// Unrolls a shader template over `n` streams.
///
/// - `[[op v: text]]` becomes `text` for `$v` = 0 … n-1, joined by `op` (`+`, `&&`, `,`, or the functions
///   `max`, `min`). Not nested.
/// - A line that still holds `$o` or `$i` is repeated for each value (for each pair if it holds both).
/// - `{{N}}` becomes n.
pub fn unroll(template: &str, n: usize) -> String {
    let mut out = String::with_capacity(template.len() * n);
    for line in template.lines() {
        let line = line.replace("{{N}}", &n.to_string());
        let line = join(&line, n);
        let (o, i) = (line.contains("$o"), line.contains("$i"));
        for ov in 0..if o { n } else { 1 } {
            for iv in 0..if i { n } else { 1 } {
                let _ =
                    writeln!(out, "{}", line.replace("$o", &ov.to_string()).replace("$i", &iv.to_string()));
            }
        }
    }
    out
}

/// Expands the `[[op v: text]]` of one line.
fn join(line: &str, n: usize) -> String {
    let mut out = String::new();
    let mut rest = line;
    while let Some(start) = rest.find("[[") {
        let end = start + rest[start..].find("]]").expect("a closed [[ … ]]");
        out.push_str(&rest[..start]);
        let (head, text) = rest[start + 2..end].split_once(": ").expect("[[op v: text]]");
        let (op, var) = head.split_once(' ').expect("[[op v: text]]");
        let term = |k: usize| text.replace(&format!("${var}"), &k.to_string());
        if op == "max" || op == "min" {
            let all = (1..n).fold(term(0), |a, k| format!("{op}({a}, {})", term(k)));
            out.push_str(&all);
        } else {
            let sep = if op == "," { ", ".to_string() } else { format!(" {op} ") };
            let all: Vec<String> = (0..n).map(term).collect();
            let _ = write!(out, "{}", all.join(&sep));
        }
        rest = &rest[end + 2..];
    }
    out.push_str(rest);
    out
}

/// Statements that read `n·n` consecutive floats of a token from `buffer` into `name_o_i`: as vectors when
/// rows are multiples of four.
pub fn load_matrix(buffer: &str, name: &str, n: usize) -> String {
    let mut s = String::new();
    for o in 0..n {
        if n.is_multiple_of(4) {
            for v in 0..n / 4 {
                let _ = writeln!(s, "    let {name}v_{o}_{v} = {buffer}[at + {}u];", o * n / 4 + v);
                for (k, c) in ["x", "y", "z", "w"].iter().enumerate() {
                    let _ = writeln!(s, "    let {name}_{o}_{} = {name}v_{o}_{v}.{c};", 4 * v + k);
                }
            }
        } else {
            for i in 0..n {
                let _ = writeln!(s, "    let {name}_{o}_{i} = {buffer}[at + {}u];", o * n + i);
            }
        }
    }
    s
}

/// Statements that write `name_o_i` as `n·n` consecutive floats of a token.
pub fn store_matrix(buffer: &str, name: &str, n: usize) -> String {
    let mut s = String::new();
    for o in 0..n {
        if n.is_multiple_of(4) {
            for v in 0..n / 4 {
                let e: Vec<String> = (0..4).map(|k| format!("{name}_{o}_{}", 4 * v + k)).collect();
                let _ = writeln!(s, "    {buffer}[at + {}u] = vec4<f32>({});", o * n / 4 + v, e.join(", "));
            }
        } else {
            for i in 0..n {
                let _ = writeln!(s, "    {buffer}[at + {}u] = {name}_{o}_{i};", o * n + i);
            }
        }
    }
    s
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::gpu::kernel::{Bind, Kernel};
    use crate::gpu::reflect::{check_default_limits, reflect};
    use crate::ops::GpuLaunch;

    #[test]
    fn templates_unroll() {
        let t = "let a_$o = [[+ i: k_$o_$i]];\nvar x = {{N}};\nlet m = [[max i: b_$i]];\nq_$o_$i = $i;\n";
        assert_eq!(
            unroll(t, 2),
            "let a_0 = k_0_0 + k_0_1;\nlet a_1 = k_1_0 + k_1_1;\nvar x = 2;\nlet m = max(b_0, b_1);\n\
             q_0_0 = 0;\nq_0_1 = 1;\nq_1_0 = 0;\nq_1_1 = 1;\n"
        );
    }

    /// Parses and validates every kernel of a launch and checks it against the default WebGPU limits.
    pub fn validate(l: &GpuLaunch) {
        for k in &l.kernels {
            validate_kernel(k);
            for b in &k.bindings {
                if let Bind::Scratch(i) = b {
                    assert!(*i < l.scratch.len());
                }
            }
        }
    }

    fn validate_kernel(k: &Kernel) {
        assert!(k.bindings.len() <= 8, "{} binds {} buffers", k.label, k.bindings.len());
        assert!(k.groups.iter().all(|&g| (1..=65_535).contains(&g)));
        let r = reflect(k).unwrap_or_else(|e| panic!("{e}\n{}", k.source));
        check_default_limits(&k.label, &r).unwrap();
        assert_eq!(r.interface.declared.len(), k.bindings.len() + 1, "{}: bindings", k.label);
    }

    /// A device for shader text.
    pub fn caps() -> crate::ops::GpuCaps {
        #[derive(Debug)]
        struct None;
        impl crate::ops::MatmulChoice for None {
            fn choose(&self, _: &crate::ops::matmul_wgsl::MatmulSpec) -> crate::ops::matmul_wgsl::Variant {
                unreachable!("no matrix product here")
            }
        }
        crate::ops::GpuCaps { is_cpu: true, matmul: std::sync::Arc::new(None) }
    }

    /// Validates the launches of every node of a graph.
    pub fn validate_graph(g: &crate::graph::Graph) {
        let caps = caps();
        for node in g.nodes() {
            if ["matmul", "map", "reduce_sum"].contains(&node.op.name()) {
                continue;
            }
            let inputs: Vec<_> = node.inputs.iter().map(|t| t.shape()).collect();
            let outputs: Vec<_> = node.outputs.iter().map(|t| t.shape()).collect();
            let mut ways = vec![None];
            ways.extend(node.op.may_alias().into_iter().map(Some));
            for in_place in ways {
                validate(&node.op.gpu(&crate::ops::GpuRequest {
                    inputs: &inputs,
                    outputs: &outputs,
                    in_place,
                    caps: &caps,
                }));
            }
        }
    }
}
