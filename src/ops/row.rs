//! What the operations over rows (norms, softmax, attention) share: sums over zipped slices that vectorise,
//! and the small template language of their shaders.

use super::Real;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};

/// Invocations of a workgroup in the row shaders.
pub(crate) const GROUP: usize = 64;

#[inline(always)]
fn fold16<T: Real>(mut s: [T; 16]) -> T {
    for w in [8, 4, 2, 1] {
        for i in 0..w {
            s[i] += s[i + w];
        }
    }
    s[0]
}

/// Σ f(a_i), with sixteen partial sums.
#[inline(always)]
pub(crate) fn sum1<T: Real>(a: &[T], f: impl Fn(T) -> T) -> T {
    let mut s = [T::ZERO; 16];
    let (ac, ar) = a.as_chunks::<16>();
    for x in ac {
        for i in 0..16 {
            s[i] += f(x[i]);
        }
    }
    let mut t = T::ZERO;
    for x in ar {
        t += f(*x);
    }
    fold16(s) + t
}

/// Σ f(a_i, b_i, c_i) of two functions at once.
#[inline(always)]
pub(crate) fn sum3<T: Real>(a: &[T], b: &[T], c: &[T], f: impl Fn(T, T, T) -> (T, T)) -> (T, T) {
    let (mut s, mut t) = ([T::ZERO; 16], [T::ZERO; 16]);
    let (ac, ar) = a.as_chunks::<16>();
    let (bc, br) = b.as_chunks::<16>();
    let (cc, cr) = c.as_chunks::<16>();
    for ((x, y), z) in ac.iter().zip(bc).zip(cc) {
        for i in 0..16 {
            let (p, q) = f(x[i], y[i], z[i]);
            s[i] += p;
            t[i] += q;
        }
    }
    let (mut u, mut v) = (T::ZERO, T::ZERO);
    for ((x, y), z) in ar.iter().zip(br).zip(cr) {
        let (p, q) = f(*x, *y, *z);
        u += p;
        v += q;
    }
    (fold16(s) + u, fold16(t) + v)
}

/// The largest element.
#[inline(always)]
pub(crate) fn max1<T: Real>(a: &[T]) -> T {
    let mut s = [a[0]; 16];
    let (ac, ar) = a.as_chunks::<16>();
    for x in ac {
        for i in 0..16 {
            s[i] = s[i].max(x[i]);
        }
    }
    for x in ar {
        s[0] = s[0].max(*x);
    }
    for w in [8, 4, 2, 1] {
        for i in 0..w {
            s[i] = s[i].max(s[i + w]);
        }
    }
    s[0]
}

/// Calls `$f::<D>(args)` with the width as a constant where that pays (short rows), else with `D = 0`.
macro_rules! by_width {
    ($d:expr, $f:ident($($a:expr),*)) => {
        match $d {
            16 => $f::<T, 16>($($a),*),
            32 => $f::<T, 32>($($a),*),
            64 => $f::<T, 64>($($a),*),
            _ => $f::<T, 0>($($a),*),
        }
    };
}
pub(crate) use by_width;

/// Copies `from` to `to` unless they are the same buffer: afterwards `to` can be worked on in place,
/// whether or not the plan gave the output the buffer of its dying input.
#[inline(always)]
pub(crate) fn fetch<T: Real>(from: Option<&[T]>, first: usize, to: &mut [T]) {
    if let Some(from) = from {
        to.copy_from_slice(&from[first..first + to.len()]);
    }
}

/// A shader from its template. Lines ending in `// if FLAG` or `// unless FLAG` are kept or dropped, and
/// `@binding(#)` counts up, so that optional buffers leave no hole; `{{NAME}}` is replaced by its value.
pub(crate) fn shader(text: &str, flags: &[&str], values: &[(&str, usize)]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut binding = 0;
    for line in text.lines() {
        let keep = match (line.rsplit_once("// if "), line.rsplit_once("// unless ")) {
            (Some((_, f)), _) => flags.contains(&f.trim()),
            (_, Some((_, f))) => !flags.contains(&f.trim()),
            _ => true,
        };
        if !keep {
            continue;
        }
        if let Some((a, b)) = line.split_once("@binding(#)") {
            out += &format!("{a}@binding({binding}){b}\n");
            binding += 1;
        } else {
            out += line;
            out.push('\n');
        }
    }
    for (name, v) in values {
        out = out.replace(&format!("{{{{{name}}}}}"), &v.to_string());
    }
    debug_assert!(!out.contains("{{"), "a value of the template is missing");
    out
}

/// Rows of at most this many vectors are held in registers by the row shaders.
const SHORT: usize = 16;

/// How a row shader reads rows of `d` elements: vectors a row, and the flags of its template.
pub(crate) fn row_flags(d: usize) -> (usize, Vec<&'static str>) {
    let vec4 = d.is_multiple_of(4);
    let n = if vec4 { d / 4 } else { d };
    let mut flags = if vec4 { vec!["vec4"] } else { vec![] };
    flags.push(match (n <= SHORT, vec4) {
        (true, _) => "short",
        (false, true) => "long4",
        (false, false) => "long1",
    });
    (n, flags)
}

/// A launch of `invocations` invocations in groups of [`GROUP`].
pub(crate) fn kernel(
    label: &'static str,
    source: String,
    entry: &'static str,
    bindings: Vec<Bind>,
    params: &[u32],
    invocations: usize,
) -> Kernel {
    assert!(params.len().is_multiple_of(4));
    Kernel {
        label: label.into(),
        source: source.into(),
        entry,
        constants: vec![],
        bindings,
        params: bytemuck::cast_slice(params).to_vec(),
        groups: fold_groups(invocations.div_ceil(GROUP) as u64),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::gpu::reflect::{check_default_limits, reflect};
    use crate::graph::Shape;
    use crate::ops::matmul_wgsl::{MatmulSpec, Variant};
    use crate::ops::{GpuCaps, GpuRequest, MatmulChoice, Op};

    #[derive(Debug)]
    struct Nobody;
    impl MatmulChoice for Nobody {
        fn choose(&self, _: &MatmulSpec) -> Variant {
            unreachable!("no products here")
        }
    }

    /// Parses and validates every shader of an operation, in and out of place, and checks bindings and limits.
    pub fn validate(op: &dyn Op, inputs: &[&[usize]]) {
        let inputs: Vec<Shape> = inputs.iter().map(|d| Shape::new(d)).collect();
        let outputs = op.outputs(&inputs);
        let caps = GpuCaps { is_cpu: true, matmul: std::sync::Arc::new(Nobody) };
        let places = std::iter::once(None).chain(op.may_alias().into_iter().map(Some));
        for in_place in places {
            let l = op.gpu(&GpuRequest { inputs: &inputs, outputs: &outputs, in_place, caps: &caps });
            for k in &l.kernels {
                let r = reflect(k).unwrap_or_else(|e| panic!("{e}\n{}", k.source));
                check_default_limits(&k.label, &r).unwrap();
                assert_eq!(
                    r.interface.declared,
                    (0..=k.bindings.len() as u32).collect::<Vec<_>>(),
                    "{}",
                    k.label
                );
                assert!(k.bindings.len() <= 8);
                assert!(k.groups.iter().all(|&g| (1..=65_535).contains(&g)));
                if let Some((i, _)) = in_place {
                    assert!(!k.bindings.contains(&Bind::In(i)));
                }
            }
        }
    }

    #[test]
    fn sums_and_maxima_of_any_length() {
        for n in [1usize, 2, 15, 16, 17, 32, 45] {
            let x: Vec<f64> = (0..n).map(|i| (i as f64 * 0.7).sin()).collect();
            assert!((sum1(&x, |v| v * v) - x.iter().map(|v| v * v).sum::<f64>()).abs() < 1e-13);
            assert_eq!(max1(&x), x.iter().copied().fold(f64::MIN, f64::max));
            let (p, q) = sum3(&x, &x, &x, |a, b, c| (a * b * c, a));
            assert!((p - x.iter().map(|v| v * v * v).sum::<f64>()).abs() < 1e-13);
            assert!((q - x.iter().sum::<f64>()).abs() < 1e-13);
        }
    }

    #[test]
    fn templates_drop_lines_and_number_bindings() {
        let t = "@binding(#) a // if x\n@binding(#) b // unless x\n@binding(#) c{{N}}";
        assert_eq!(
            shader(t, &["x"], &[("N", 3)]).lines().map(|l| &l[..13]).collect::<Vec<_>>(),
            ["@binding(0) a", "@binding(1) c"]
        );
        assert!(shader(t, &[], &[("N", 3)]).contains("@binding(0) b"));
        assert!(shader(t, &[], &[("N", 3)]).contains("@binding(1) c3"));
    }
}
