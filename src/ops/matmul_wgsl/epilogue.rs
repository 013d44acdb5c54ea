//! The text that turns sums into stored values: extra inputs, the epilogue's expression, the store.

use std::fmt::Write as _;

use super::plan::Plan;
use super::{Bind, Buffer, Extra};

impl Plan {
    /// Whether this kernel stores finished values (else: one chunk's partial sums).
    fn finished(&self) -> bool {
        self.split == 1
    }

    /// Bindings of A, B, what the store reads, and where it writes, for a kernel that multiplies.
    pub fn product_buffers(&self, vec_a: bool, vec_b: bool, vec_c: bool) -> Vec<Buffer> {
        let read = |i, name: &str, vec| Buffer { bind: Bind::In(i), name: name.into(), vec, write: false };
        let mut buffers = vec![read(0, "A", vec_a), read(1, "B", vec_b)];
        if self.finished() {
            buffers.extend(self.extra_buffers(vec_c));
        }
        let bind = if self.finished() { Bind::Out(0) } else { Bind::Scratch(0) };
        buffers.push(Buffer { bind, name: "C".into(), vec: vec_c, write: true });
        buffers
    }

    /// Bindings of the extra inputs, declared as vectors where C is and their layout allows it.
    pub fn extra_buffers(&self, vec_c: bool) -> impl Iterator<Item = Buffer> {
        self.extras.iter().enumerate().map(move |(i, extra)| Buffer {
            bind: Bind::In(2 + i),
            name: format!("X{i}"),
            vec: vec_c && matches!(extra, Extra::Full | Extra::Row),
            write: false,
        })
    }

    /// `fn epilogue(product, x0, …) -> f32`, and for vector stores `fn epilogue4` over four columns.
    pub fn epilogue_functions(&self, vec_c: bool) -> String {
        let mut text = String::new();
        let args = |ty: &str| -> String {
            (0..self.extras.len()).fold(String::new(), |s, i| s + &format!(", x{i}: {ty}"))
        };
        let sum = match self.spec.accumulate {
            Some(i) => format!("product + x{i}"),
            None => "product".into(),
        };
        let _ = writeln!(
            text,
            "fn epilogue(product: f32{}) -> f32 {{\n  let acc = {sum};\n  return {};\n}}",
            args("f32"),
            self.epilogue
        );
        if vec_c {
            let call = |c: char| {
                let xs = (0..self.extras.len()).fold(String::new(), |s, i| s + &format!(", x{i}.{c}"));
                format!("epilogue(product.{c}{xs})")
            };
            let _ = writeln!(
                text,
                "fn epilogue4(product: vec4<f32>{}) -> vec4<f32> {{\n  return vec4<f32>({}, {}, {}, {});\n}}",
                args("vec4<f32>"),
                call('x'),
                call('y'),
                call('z'),
                call('w')
            );
        }
        text
    }

    /// The value of extra `i` at WGSL expressions `b`, `row`, `col`: f32, or four columns from `col`.
    fn extra(&self, i: usize, vec: bool, b: &str, row: &str, col: &str) -> String {
        match (self.extras[i], vec) {
            (Extra::Full, false) => format!("X{i}[({b} * p.m + {row}) * p.n + {col}]"),
            (Extra::Full, true) => format!("X{i}[(({b} * p.m + {row}) * p.n + {col}) / 4u]"),
            (Extra::Row, false) => format!("X{i}[{col}]"),
            (Extra::Row, true) => format!("X{i}[({col}) / 4u]"),
            (Extra::Col, false) => format!("X{i}[{b} * p.m + {row}]"),
            (Extra::Col, true) => format!("vec4<f32>(X{i}[{b} * p.m + {row}])"),
            (Extra::Scalar, false) => format!("X{i}[0]"),
            (Extra::Scalar, true) => format!("vec4<f32>(X{i}[0])"),
            (Extra::Strided { .. }, vec) => {
                let at = |e: u32| {
                    let s = format!("p.strides[{i}]");
                    format!("X{i}[{b} * {s}.x + ({row}) * {s}.y + ({col} + {e}u) * {s}.z]")
                };
                if vec { format!("vec4<f32>({}, {}, {}, {})", at(0), at(1), at(2), at(3)) } else { at(0) }
            }
        }
    }

    /// Statement storing `acc` (f32, or vec4 when `vec`) at the given place of C; `part` is the chunk.
    /// The epilogue is applied, unless this is a partial sum.
    pub fn store(&self, vec: bool, at: [&str; 3], acc: &str) -> String {
        let [b, row, col] = at;
        let b_out = if self.finished() { b.to_string() } else { format!("(part * p.batch + {b})") };
        let index = format!("({b_out} * p.m + {row}) * p.n + {col}");
        let value = if self.finished() { self.finish(vec, at, acc) } else { acc.to_string() };
        if vec { format!("C[({index}) / 4u] = {value};") } else { format!("C[{index}] = {value};") }
    }

    /// The epilogue applied to `acc`, an expression.
    pub fn finish(&self, vec: bool, [b, row, col]: [&str; 3], acc: &str) -> String {
        if self.extras.is_empty() && self.epilogue == "acc" {
            return acc.to_string();
        }
        let mut xs = String::new();
        for i in 0..self.extras.len() {
            let _ = write!(xs, ", {}", self.extra(i, vec, b, row, col));
        }
        format!("epilogue{}({acc}{xs})", if vec { "4" } else { "" })
    }
}
