//! `mhc_project`: the projection and the mean square that all mHC coefficients come from, in one pass over the
//! state (mHC, arXiv 2512.24880 eqs. 14 and 15; math.md section 4).
//!
//! `S[.., n, d], φ[n·d, 2n + n²] → raw_pre[.., n], raw_post[.., n], raw_res[.., n²], ms[.., 1]`, n = 1 to 8.
//! With v = vec(S), index i·d + c: raw = v φ, columns pre | post | res (o·n + i); ms = mean(v²). The division by
//! r = √(ms + ε) comes after, in a map. Backward, two operations: dS = draw φᵀ + (2/nd) dms S (+ what came
//! before), and dφ = vᵀ draw, a long sum over tokens. Outputs without a gradient count as zeros.

#![allow(clippy::needless_range_loop, clippy::explicit_counter_loop)] // arrays walked in step

use super::streams::{MAX_STREAMS, unroll};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};
use crate::par::*;
use std::any::TypeId;
use std::fmt::Write;
use std::ops::Range;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct MhcProject {
    n: usize,
    d: usize,
}

/// dS of [`MhcProject`]. Inputs: draw of the segments in `has` (pre, post, res); φ; with `square` dms and S;
/// with `accumulate` a gradient to add to. Output: dS.
#[derive(Clone, Debug)]
pub struct MhcProjectGrad {
    n: usize,
    d: usize,
    has: [bool; 3],
    square: bool,
    accumulate: bool,
}

/// dφ of [`MhcProject`]. Inputs: S, then draw of the segments in `has`. Output: dφ.
#[derive(Clone, Debug)]
pub struct MhcProjectWeight {
    n: usize,
    d: usize,
    has: [bool; 3],
}

/// Columns of a segment: pre, post, res.
fn segment(n: usize, s: usize) -> Range<usize> {
    [0..n, n..2 * n, 2 * n..n * (n + 2)][s].clone()
}

/// The columns from the first to the last present segment.
fn span(n: usize, has: [bool; 3]) -> Range<usize> {
    let present = || (0..3).filter(|&s| has[s]);
    match (present().next(), present().next_back()) {
        (Some(a), Some(b)) => segment(n, a).start..segment(n, b).end,
        _ => 0..0,
    }
}

/// A matrix in a slice: (elements, row stride, column stride).
type View<'a, T> = (&'a [T], usize, usize);

/// c (m × n, rows `ldc` apart) = a·b, or += with `add`.
fn product<T: Real>(
    (m, n, k): (usize, usize, usize),
    a: View<'_, T>,
    b: View<'_, T>,
    c: &mut [T],
    ldc: usize,
    add: bool,
) {
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    let reach = |r: usize, c: usize, rs: usize, cs: usize| (r - 1) * rs + (c - 1) * cs;
    assert!(reach(m, k, a.1, a.2) < a.0.len());
    assert!(reach(k, n, b.1, b.2) < b.0.len());
    assert!(reach(m, n, ldc, 1) < c.len() && ldc >= n);
    macro_rules! call {
        ($t:ty) => {
            // SAFETY: every element that the strides reach was checked above; c is borrowed mutably, so it
            // does not overlap a or b; T is the type that the TypeId names.
            unsafe {
                gemm::gemm(
                    m,
                    n,
                    k,
                    c.as_mut_ptr() as *mut $t,
                    1,
                    ldc as isize,
                    add,
                    a.0.as_ptr() as *const $t,
                    a.2 as isize,
                    a.1 as isize,
                    b.0.as_ptr() as *const $t,
                    b.2 as isize,
                    b.1 as isize,
                    1.0,
                    1.0,
                    false,
                    false,
                    false,
                    gemm::Parallelism::None,
                )
            }
        };
    }
    if TypeId::of::<T>() == TypeId::of::<f32>() { call!(f32) } else { call!(f64) }
}

/// Copies the draws of tokens `at..at + rows` side by side, columns `cols` of raw; absent segments are zeros.
fn pack<T: Real>(
    draws: &[Option<&[T]>; 3],
    n: usize,
    cols: &Range<usize>,
    at: usize,
    rows: usize,
    out: &mut Vec<T>,
) {
    let w = cols.len();
    out.clear();
    out.resize(rows * w, T::ZERO);
    for (s, draw) in draws.iter().enumerate() {
        if let Some(draw) = draw {
            let seg = segment(n, s);
            let (first, len) = (seg.start - cols.start, seg.len());
            let rows = draw[at * len..].chunks_exact(len).zip(out.chunks_exact_mut(w));
            for (x, y) in rows {
                y[first..first + len].copy_from_slice(x);
            }
        }
    }
}

/// Tokens of one block: with a state of 128 elements a token it stays in the second-level cache.
const BLOCK: usize = 128;

impl MhcProject {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (n, k, w) = (self.n, self.n * self.d, self.n * (self.n + 2));
        let (s, phi) = (c.input(0), c.input(1));
        let outs = (
            c.output(0).par_chunks_mut(BLOCK * n),
            c.output(1).par_chunks_mut(BLOCK * n),
            c.output(2).par_chunks_mut(BLOCK * n * n),
            c.output(3).par_chunks_mut(BLOCK),
        );
        let scale = T::of(1.0 / k as f64);
        outs.into_par_iter().enumerate().for_each_init(Vec::new, |raw, (b, (pre, post, res, ms))| {
            let rows = ms.len();
            let s = &s[b * BLOCK * k..][..rows * k];
            raw.resize(rows * w, T::ZERO);
            product((rows, w, k), (s, k, 1), (phi, w, 1), raw, w, false);
            T::simd(
                #[inline(always)]
                || {
                    for (ms, s) in ms.iter_mut().zip(s.chunks_exact(k)) {
                        *ms = super::real::dot(s, s) * scale;
                    }
                },
            );
            let small = pre.chunks_exact_mut(n).zip(post.chunks_exact_mut(n));
            for ((raw, (pre, post)), res) in raw.chunks_exact(w).zip(small).zip(res.chunks_exact_mut(n * n)) {
                pre.copy_from_slice(&raw[..n]);
                post.copy_from_slice(&raw[n..2 * n]);
                res.copy_from_slice(&raw[2 * n..]);
            }
        });
    }
}

impl MhcProjectGrad {
    /// Positions of the inputs: draws, φ, dms and S, the gradient to add to.
    fn places(&self) -> ([Option<usize>; 3], usize, Option<(usize, usize)>, Option<usize>) {
        let mut next = 0;
        let mut take = || {
            next += 1;
            next - 1
        };
        let draws = self.has.map(|h| h.then(&mut take));
        let phi = take();
        let square = self.square.then(|| (take(), take()));
        (draws, phi, square, self.accumulate.then(take))
    }

    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (n, k, w) = (self.n, self.n * self.d, self.n * (self.n + 2));
        let (draws, phi, square, acc) = self.places();
        let draws = draws.map(|i| i.map(|i| c.input(i)));
        let phi = c.input(phi);
        let square = square.map(|(m, s)| (c.input(m), c.input(s)));
        let ds = c.output(0);
        // the gradient to add to is either elsewhere or already in ds
        let in_place = acc.is_some_and(|i| c.input_raw(i).0 == ds.as_ptr());
        let before = acc.filter(|_| !in_place).map(|i| c.input(i));
        let cols = span(n, self.has);
        let scale = T::of(2.0 / k as f64);
        ds.par_chunks_mut(BLOCK * k).enumerate().for_each_init(Vec::new, |draw, (b, ds)| {
            let (at, rows) = (b * BLOCK, ds.len() / k);
            if let Some(z) = before {
                ds.copy_from_slice(&z[at * k..][..rows * k]);
            }
            let mut begun = self.accumulate;
            if let Some((dms, s)) = square {
                T::simd(
                    #[inline(always)]
                    || {
                        let tokens = ds.chunks_exact_mut(k).zip(s[at * k..].chunks_exact(k)).zip(&dms[at..]);
                        for ((y, x), m) in tokens {
                            let f = scale * *m;
                            if begun {
                                super::real::axpy(f, x, y);
                            } else {
                                for (y, x) in y.iter_mut().zip(x) {
                                    *y = f * *x;
                                }
                            }
                        }
                    },
                );
                begun = true;
            }
            pack(&draws, n, &cols, at, rows, draw);
            let wide = cols.len();
            product((rows, k, wide), (draw, wide, 1), (&phi[cols.start..], 1, w), ds, k, begun);
        });
    }
}

impl MhcProjectWeight {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (n, k, w) = (self.n, self.n * self.d, self.n * (self.n + 2));
        let s = c.input(0);
        let mut next = 1;
        let draws = self.has.map(|h| {
            h.then(|| {
                next += 1;
                c.input(next - 1)
            })
        });
        let cols = span(n, self.has);
        let out = c.output(0);
        let tokens = s.len() / k;
        let per = tokens.div_ceil(16).max(1024);
        // fixed runs of tokens, added in order
        let parts: Vec<Vec<T>> = (0..tokens.div_ceil(per))
            .into_par_iter()
            .map_init(Vec::new, |draw, run| {
                let (lo, hi) = (run * per, ((run + 1) * per).min(tokens));
                let mut part = vec![T::ZERO; k * w];
                pack(&draws, n, &cols, lo, hi - lo, draw);
                let wide = cols.len();
                let (sv, dv) = ((&s[lo * k..hi * k], 1, k), (&draw[..], wide, 1));
                product((k, wide, hi - lo), sv, dv, &mut part[cols.start..], w, false);
                part
            })
            .collect();
        out.fill(T::ZERO);
        for p in &parts {
            for (o, v) in out.iter_mut().zip(p) {
                *o += *v;
            }
        }
    }
}

/// Tokens of one invocation. With a tile of eight tokens by two or three groups of columns a load serves a
/// dozen products: on the software driver, whose loads go lane by lane, that is what counts.
const TILE: usize = 8;

const LETTERS: [&str; 4] = ["x", "y", "z", "w"];

/// How the shaders read: the state in units of `unit` elements, columns in groups of `cols`, so that a group
/// lies in one segment.
struct Text {
    unit: usize,
    cols: usize,
}

impl Text {
    fn new(n: usize, d: usize) -> Self {
        let cols = [4, 2].into_iter().find(|c| n.is_multiple_of(*c)).unwrap_or(1);
        Text { unit: if (n * d).is_multiple_of(4) { 4 } else { 1 }, cols }
    }

    fn elem(len: usize) -> &'static str {
        ["", "f32", "vec2<f32>", "", "vec4<f32>"][len]
    }

    fn fill(&self, template: &str) -> String {
        let dot = |len: usize| if len == 1 { "a * b" } else { "dot(a, b)" };
        template
            .replace("{{S}}", Self::elem(self.unit))
            .replace("{{C}}", Self::elem(self.cols))
            .replace("{{DOT_S}}", dot(self.unit))
            .replace("{{INNER}}", &self.inner())
    }

    /// a·b + c over a group of columns.
    fn inner(&self) -> String {
        if self.cols == 1 {
            return "fma(a, b, c)".into();
        }
        LETTERS[..self.cols].iter().fold("c".into(), |sum, l| format!("fma(a.{l}, b.{l}, {sum})"))
    }

    /// Groups of columns of one invocation, of `groups` in all.
    fn wide(&self, groups: usize) -> usize {
        let try_: &[usize] = if self.cols == 1 { &[7, 5, 3] } else { &[3, 2] };
        try_.iter().copied().find(|q| groups.is_multiple_of(*q)).unwrap_or(1)
    }

    /// Component `j` of a unit of the state.
    fn part(&self, name: &str, j: usize) -> String {
        if self.unit == 1 { name.into() } else { format!("{name}.{}", LETTERS[j]) }
    }
}

fn kernel(
    label: &'static str,
    source: String,
    bindings: Vec<Bind>,
    params: [u32; 8],
    invocations: usize,
) -> Kernel {
    Kernel {
        label: label.into(),
        source: source.into(),
        entry: "main",
        constants: vec![],
        bindings,
        params: bytemuck::cast_slice(&params).to_vec(),
        groups: fold_groups(invocations.div_ceil(64) as u64),
    }
}

impl Op for MhcProject {
    fn name(&self) -> &'static str {
        "mhc_project"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        let dims = inputs[0].dims();
        let lead = &dims[..dims.len() - 2];
        [self.n, self.n, self.n * self.n, 1].map(|w| Shape::new(&[lead, &[w]].concat())).to_vec()
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        inputs[0].len() as f64 * 2.0 * (self.n * (self.n + 2) + 1) as f64
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let (n, d) = (self.n, self.d);
        let (s, phi) = (v.inputs[0], v.inputs[1]);
        let has = [0, 1, 2].map(|i| v.grads[i].is_some());
        let draws: Vec<Tensor> = v.grads[..3].iter().copied().flatten().collect();
        let dphi = (v.wanted[1] && !draws.is_empty())
            .then(|| g.push(MhcProjectWeight { n, d, has }, &[&[s], &draws[..]].concat()));
        let ds = v.wanted[0].then(|| {
            let mut ins = draws.clone();
            ins.push(phi);
            if let Some(dms) = v.grads[3] {
                ins.extend([dms, s]);
            }
            let op = MhcProjectGrad { n, d, has, square: v.grads[3].is_some(), accumulate: false };
            g.push(op, &ins).reshaped(s.shape())
        });
        vec![ds, dphi]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let (n, k) = (self.n, self.n * self.d);
        let t = Text::new(n, self.d);
        let tokens = r.inputs[0].len() / k;
        let groups = n * (n + 2) / t.cols;
        let wide = t.wide(groups);
        // token `$o` of the tile by group `q` of columns
        let (mut start, mut step, mut store) = (String::new(), String::new(), String::new());
        for q in 0..wide {
            let _ = writeln!(start, "    var a_$o_{q} = {{{{C}}}}(0.0);");
            let _ = writeln!(store, "    put(t + $ou, group + {q}u, a_$o_{q}, sum_$o);");
        }
        for j in 0..t.unit {
            for q in 0..wide {
                let _ = writeln!(step, "        let w_{j}_{q} = phi[row + {}u];", j * groups + q);
            }
            let x = t.part("x_$o", j);
            for q in 0..wide {
                let _ = writeln!(step, "        a_$o_{q} = fma({{{{C}}}}({x}), w_{j}_{q}, a_$o_{q});");
            }
        }
        let text = include_str!("../../shaders/mhc_project.wgsl")
            .replace("{{START}}", &start)
            .replace("{{STEP}}", &step)
            .replace("{{STORE}}", &store)
            .replace("{{WIDE}}", &wide.to_string());
        let per = (groups * t.unit) as u32;
        let scale = (1.0 / k as f32).to_bits();
        let (row, own) = ((k / t.unit) as u32, (n / t.cols) as u32);
        let params = [tokens as u32, row, per, scale, groups as u32, (groups / wide) as u32, own, 0];
        let bind = vec![Bind::In(0), Bind::In(1), Bind::Out(0), Bind::Out(1), Bind::Out(2), Bind::Out(3)];
        let work = tokens.div_ceil(TILE) * (groups / wide);
        kernel("mhc_project", unroll(&t.fill(&text), TILE), bind, params, work).into()
    }
}

impl Op for MhcProjectGrad {
    fn name(&self) -> &'static str {
        "mhc_project_grad"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        let (draws, phi, square, acc) = self.places();
        let tokens = match (draws, square) {
            ([Some(i), _, _] | [None, Some(i), _], _) => inputs[i].len() / self.n,
            ([None, None, Some(i)], _) => inputs[i].len() / (self.n * self.n),
            (_, Some((m, _))) => inputs[m].len(),
            _ => unreachable!("called with a gradient"),
        };
        assert_eq!(inputs[phi].len(), self.n * self.d * self.n * (self.n + 2));
        let out = Shape::new(&[tokens, self.n, self.d]);
        assert!(acc.is_none_or(|i| inputs[i].len() == out.len()));
        vec![out]
    }

    fn flops(&self, _: &[Shape], outputs: &[Shape]) -> f64 {
        let per = 2 * span(self.n, self.has).len() + 2 * self.square as usize + self.accumulate as usize;
        (per * outputs[0].len()) as f64
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("second derivatives are not needed")
    }

    fn may_alias(&self) -> Vec<(usize, usize)> {
        self.places().3.map(|i| (i, 0)).into_iter().collect()
    }

    fn with_accumulate(&self) -> Option<Box<dyn Op>> {
        (!self.accumulate).then(|| Box::new(MhcProjectGrad { accumulate: true, ..*self }) as Box<dyn Op>)
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let (n, k) = (self.n, self.n * self.d);
        let t = Text::new(n, self.d);
        let tokens = r.outputs[0].len() / k;
        let (draws, phi, square, acc) = self.places();
        let mut bind = vec![];
        let mut decl = String::new();
        let mut declare = |b: Bind, name: &str, elem: &str| {
            let access = if matches!(b, Bind::Out(_)) { "read_write" } else { "read" };
            let at = bind.len();
            let _ = writeln!(decl, "@group(0) @binding({at}) var<storage, {access}> {name} : array<{elem}>;");
            bind.push(b);
        };
        declare(Bind::In(phi), "phi", "{{C}}");
        declare(Bind::Out(0), "y", "{{S}}");
        let groups = n * (n + 2) / t.cols;
        let row = k / t.unit;
        // token `$o` of the tile by unit `u` of the state; columns in a loop for each segment with a gradient
        let units = if row.is_multiple_of(2) { 2 } else { 1 };
        let mut step = String::new();
        for (s, name) in ["pre", "post", "res"].iter().enumerate() {
            let Some(i) = draws[s] else { continue };
            declare(Bind::In(i), name, "{{C}}");
            let seg = segment(n, s);
            let (len, first) = (seg.len() / t.cols, seg.start / t.cols);
            let _ = writeln!(step, "    for (var c = 0u; c < {len}u; c++) {{");
            for j in 0..units * t.unit {
                let _ = writeln!(step, "        let w_{j} = phi[row + c + {}u];", j * groups + first);
            }
            let _ = writeln!(step, "        let g_$o = {name}[t_$o * {len}u + c];");
            for j in 0..units * t.unit {
                let a = t.part(&format!("a_$o_{}", j / t.unit), j % t.unit);
                let _ = writeln!(step, "        {a} = inner(g_$o, w_{j}, {a});");
            }
            step += "    }\n";
        }
        let (mut start, mut load) = ("{{S}}(0.0)".to_string(), "");
        if let Some((m, s)) = square {
            declare(Bind::In(m), "dms", "f32");
            declare(Bind::In(s), "s", "{{S}}");
            load = "    let f_$o = p.scale * dms[t_$o];";
            start = "f_$o * s[y_$o + @u]".into();
        }
        match acc {
            Some(_) if r.in_place.is_some() => start += " + y[y_$o + @u]",
            Some(i) => {
                declare(Bind::In(i), "z", "{{S}}");
                start += " + z[y_$o + @u]";
            }
            None => {}
        }
        let (mut begin, mut store) = (String::new(), String::new());
        for u in 0..units {
            let _ = writeln!(begin, "    var a_$o_{u} = {};", start.replace('@', &u.to_string()));
            let _ = writeln!(store, "    if (t + $ou < p.tokens) {{ y[y_$o + {u}u] = a_$o_{u}; }}");
        }
        let text = include_str!("../../shaders/mhc_project_grad.wgsl")
            .replace("{{DECLARE}}", &decl)
            .replace("{{UNIFORM}}", &bind.len().to_string())
            .replace("{{LOAD}}", load)
            .replace("{{START}}", &begin)
            .replace("{{STEP}}", &step)
            .replace("{{STORE}}", &store)
            .replace("{{UNITS}}", &units.to_string());
        let scale = (2.0 / k as f32).to_bits();
        let per = (groups * t.unit) as u32;
        let params = [tokens as u32, row as u32, per, scale, (row / units) as u32, 0, 0, 0];
        let work = tokens.div_ceil(TILE) * (row / units);
        kernel("mhc_project_grad", unroll(&t.fill(&text), TILE), bind, params, work).into()
    }
}

impl Op for MhcProjectWeight {
    fn name(&self) -> &'static str {
        "mhc_project_weight"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert!(inputs[0].len().is_multiple_of(self.n * self.d));
        vec![Shape::new(&[self.n * self.d, self.n * (self.n + 2)])]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        2.0 * inputs[0].len() as f64 * span(self.n, self.has).len() as f64
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("second derivatives are not needed")
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let (n, k) = (self.n, self.n * self.d);
        let w = n * (n + 2);
        let tokens = r.inputs[0].len() / k;
        let runs = tokens.div_ceil(256).min(64);
        let per = tokens.div_ceil(runs);
        // a tile of the product an invocation: `tall` elements of the state by `cols` columns of one segment
        let tall = [8, 4].into_iter().find(|t| k.is_multiple_of(*t)).unwrap_or(1);
        let cols = Text::new(n, self.d).cols;
        let elem = Text::elem(cols);
        let mut kernels = vec![];
        let mut next = 1;
        for s in (0..3).filter(|&s| self.has[s]) {
            let seg = segment(n, s);
            let groups = seg.len() / cols;
            let wide = if groups.is_multiple_of(2) { 2 } else { 1 };
            let (mut start, mut load, mut store) = (String::new(), String::new(), String::new());
            for v in 0..tall.div_ceil(4) {
                let _ = writeln!(load, "        let x_{v} = s[at + {v}u];");
            }
            for q in 0..wide {
                let _ = writeln!(load, "        let g_{q} = draw[t * p.groups + group + {q}u];");
                for o in 0..tall {
                    let x = if tall == 1 { "x_0".into() } else { format!("x_{}.{}", o / 4, LETTERS[o % 4]) };
                    let _ = writeln!(start, "    var a_{o}_{q} = {elem}(0.0);");
                    let _ = writeln!(load, "        a_{o}_{q} = fma({elem}({x}), g_{q}, a_{o}_{q});");
                    for c in 0..cols {
                        let v = if cols == 1 { "".into() } else { format!(".{}", LETTERS[c]) };
                        let at = q * cols + c;
                        let _ = writeln!(store, "    y[to + {o}u * p.columns + {at}u] = a_{o}_{q}{v};");
                    }
                }
            }
            let text = include_str!("../../shaders/mhc_project_weight.wgsl")
                .replace("{{S}}", if tall == 1 { "f32" } else { "vec4<f32>" })
                .replace("{{G}}", elem)
                .replace("{{UNITS}}", &tall.div_ceil(4).to_string())
                .replace("{{TALL}}", &tall.to_string())
                .replace("{{COLS}}", &cols.to_string())
                .replace("{{WIDE}}", &wide.to_string())
                .replace("{{START}}", &start)
                .replace("{{LOAD}}", &load)
                .replace("{{STORE}}", &store);
            let params = [
                tokens as u32,
                per as u32,
                runs as u32,
                (k / tall) as u32,
                groups as u32,
                seg.start as u32,
                w as u32,
                0,
            ];
            let bind = vec![Bind::In(0), Bind::In(next), Bind::Scratch(0)];
            let work = runs * (k / tall) * (groups / wide);
            kernels.push(kernel("mhc_project_weight", text, bind, params, work));
            next += 1;
        }
        let mask = (0..3).fold(0, |m, s| m | (self.has[s] as u32) << s);
        let sum = include_str!("../../shaders/mhc_project_sum.wgsl").to_string();
        let params = [(k * w) as u32, runs as u32, w as u32, n as u32, mask, 0, 0, 0];
        kernels.push(kernel("mhc_project_sum", sum, vec![Bind::Scratch(0), Bind::Out(0)], params, k * w));
        GpuLaunch { kernels, scratch: vec![runs * k * w] }
    }
}

impl Graph {
    /// `S[.., n, d], φ[n·d, 2n + n²] → (raw_pre[.., n], raw_post[.., n], raw_res[.., n²], ms[.., 1])`: the
    /// projection of the flattened state and its mean square.
    ///
    /// # Panics
    /// If the sizes do not fit or n is not in 1..=8.
    pub fn mhc_project(&mut self, s: Tensor, phi: Tensor) -> (Tensor, Tensor, Tensor, Tensor) {
        let dims = s.shape().dims();
        assert!(dims.len() >= 3, "mhc_project of {}", s.shape());
        let (n, d) = (dims[dims.len() - 2], dims[dims.len() - 1]);
        assert!(
            n <= MAX_STREAMS && phi.shape() == Shape::new(&[n * d, n * (n + 2)]),
            "mhc_project of {} with φ {}",
            s.shape(),
            phi.shape()
        );
        let o = self.push_multi(MhcProject { n, d }, &[s, phi]);
        (o[0], o[1], o[2], o[3])
    }
}

#[cfg(test)]
#[path = "mhc_project_tests.rs"]
mod tests;
