//! The graph, its adjoints and passes on the operations that everything else is built from.

use super::cpu::{CpuProgram, CpuState};
use super::{Graph, InputId, Role, Tensor, dot, fuse, plan};
use crate::ops::matmul::Trans;

/// Deterministic numbers in (-1, 1).
pub fn noise(n: usize, seed: u64) -> Vec<f64> {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            (s >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        })
        .collect()
}

/// Runs a graph in f64 with the given states.
pub fn run64(g: &Graph, keep: &[Tensor], states: &[(&str, Vec<f64>)]) -> Vec<Vec<f64>> {
    let mut p = CpuProgram::<f64>::new(g.clone(), keep);
    plan::verify(g, keep, p.plan()).unwrap();
    let mut s = CpuState { values: states.iter().map(|(n, v)| (n.into(), v.clone().into())).collect() };
    p.run(&mut s);
    keep.iter().map(|t| p.read(*t)).collect()
}

/// Finite differences of `sum(weights · f(states))` against the adjoints, with a nonlinear map before and
/// after (the operation sits mid-graph), unfused and fused.
pub fn check_vjp(states: &[(&str, Vec<usize>)], f: impl Fn(&mut Graph, &[Tensor]) -> Vec<Tensor>) {
    check_vjp_at(states, 1.0, f)
}

/// [`check_vjp`] with state values in (-scale, scale).
pub fn check_vjp_at(
    states: &[(&str, Vec<usize>)],
    scale: f64,
    f: impl Fn(&mut Graph, &[Tensor]) -> Vec<Tensor>,
) {
    use crate::ops::expr::{Bin, Expr, Un};
    let mut g = Graph::new();
    let params: Vec<Tensor> = states.iter().map(|(n, d)| g.state(n, &d[..])).collect();
    // x + 0.1·tanh(x): keeps the values, is not linear
    let mut e = Expr::input(0);
    let t = e.un(Un::Tanh, 0);
    let c = e.num(0.1);
    let m = e.bin(Bin::Mul, t, c);
    let r = e.bin(Bin::Add, 0, m);
    let e = e.finish(r);
    let xs: Vec<Tensor> = params.iter().map(|p| g.map(e.clone(), &[*p])).collect();
    let ys = f(&mut g, &xs);
    let mut loss = None;
    for (i, y) in ys.iter().enumerate() {
        let w = g.constant(y.shape(), noise(y.shape().len(), 77 + i as u64));
        let z = g.map(e.clone(), &[*y]);
        let p = g.mul(z, w);
        let s = g.sum_all(p);
        loss = Some(match loss {
            None => s,
            Some(l) => g.add(l, s),
        });
    }
    let loss = loss.unwrap();
    let grads = g.gradients(loss, &params);
    let values: Vec<(&str, Vec<f64>)> = states
        .iter()
        .enumerate()
        .map(|(i, (n, d))| (*n, noise(d.iter().product(), i as u64 + 5).iter().map(|x| x * scale).collect()))
        .collect();
    let mut keep = vec![loss];
    keep.extend(&grads);
    let plain = run64(&g, &keep, &values);
    let (fg, fk) = fuse::fuse(&g, &keep);
    let fused = run64(&fg, &fk, &values);
    for (a, b) in plain.iter().zip(&fused) {
        for (x, y) in a.iter().zip(b) {
            assert!((x - y).abs() <= 1e-11 * (1.0 + x.abs()), "fused {y} differs from plain {x}");
        }
    }
    let top = plain[1..].iter().flatten().fold(0f64, |m, x| m.max(x.abs()));
    for (i, (name, v)) in values.iter().enumerate() {
        let step = (v.len() / 7).max(1);
        for j in (0..v.len()).step_by(step) {
            let h = 1e-5;
            let at = |d: f64| {
                let mut w = values.clone();
                w[i].1[j] += d;
                run64(&g, &[loss], &w)[0][0]
            };
            let want = (8.0 * (at(h) - at(-h)) - (at(2.0 * h) - at(-2.0 * h))) / (12.0 * h);
            let got = plain[1 + i][j];
            assert!(
                (got - want).abs() <= 2e-7 * (top + want.abs()),
                "d/d{name}[{j}]: adjoint {got}, differences {want}"
            );
        }
    }
}

#[test]
fn elementwise_with_broadcasts() {
    check_vjp(&[("a", vec![3, 5, 4]), ("b", vec![5, 1]), ("c", vec![4]), ("d", vec![1])], |g, x| {
        let p = g.mul(x[0], x[1]);
        let q = g.add(p, x[2]);
        let r = g.relu(q);
        let s = g.sub(r, x[3]);
        vec![g.mul(s, p)]
    });
}

#[test]
fn reductions() {
    check_vjp(&[("a", vec![3, 5, 4])], |g, x| (0..3).map(|i| g.sum_axis(x[0], i)).collect());
}

#[test]
fn products_of_every_layout() {
    for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
        let t = Trans { a: ta, b: tb };
        let sw = |x: usize, y: usize, t: bool| if t { vec![y, x] } else { vec![x, y] };
        let bat = |mut d: Vec<usize>| {
            d.insert(0, 3);
            d
        };
        check_vjp(&[("a", sw(5, 7, ta)), ("b", sw(7, 4, tb))], |g, x| vec![g.matmul_t(x[0], x[1], t)]);
        check_vjp(&[("a", bat(sw(5, 7, ta))), ("b", bat(sw(7, 4, tb)))], |g, x| {
            vec![g.matmul_t(x[0], x[1], t)]
        });
        check_vjp(&[("a", sw(5, 7, ta)), ("b", bat(sw(7, 4, tb)))], |g, x| vec![g.matmul_t(x[0], x[1], t)]);
        check_vjp(&[("a", bat(sw(5, 7, ta))), ("b", sw(7, 4, tb))], |g, x| vec![g.matmul_t(x[0], x[1], t)]);
    }
}

#[test]
fn dense_layers_with_bias_and_relu_fuse_into_one_product() {
    let build = |g: &mut Graph, x: &[Tensor]| {
        let y = g.matmul(x[0], x[1]);
        let y = g.add(y, x[2]);
        vec![g.relu(y)]
    };
    check_vjp(&[("x", vec![6, 5]), ("w", vec![5, 3]), ("b", vec![3])], build);
    let mut g = Graph::new();
    let p = [g.state("x", [6, 5]), g.state("w", [5, 3]), g.state("b", [3])];
    let y = build(&mut g, &p);
    let (f, keep) = fuse::fuse(&g, &y);
    assert_eq!(plan::live_nodes(&f, &keep).len(), 1, "product, bias and relu are one node");
}

#[test]
fn sums_become_accumulation_and_maps_one_node() {
    let mut g = Graph::new();
    let (a, b, w, v) =
        (g.state("a", [6, 5]), g.state("b", [6, 4]), g.state("w", [5, 3]), g.state("v", [4, 3]));
    let (p, q) = (g.matmul(a, w), g.matmul(b, v));
    let s = g.add(p, q);
    let (f, keep) = fuse::fuse(&g, &[s]);
    assert_eq!(plan::live_nodes(&f, &keep).len(), 2);
    let states: Vec<(&str, Vec<f64>)> = [("a", 30), ("b", 24), ("w", 15), ("v", 12)]
        .iter()
        .map(|(n, k)| (*n, noise(*k, *k as u64)))
        .collect();
    let x = run64(&g, &[s], &states);
    let y = run64(&f, &keep, &states);
    for (x, y) in x[0].iter().zip(&y[0]) {
        assert!((x - y).abs() < 1e-14);
    }
}

#[test]
fn long_products_split_and_sum_in_place() {
    // k long enough for the split path; the sum of two such products accumulates in place
    let mut g = Graph::new();
    let (a, b) = (g.state("a", [9000, 6]), g.state("b", [9000, 5]));
    let t = Trans { a: true, b: false };
    let p = g.matmul_t(a, b, t);
    let q = g.affine(p, 2.0, 0.0);
    let r = g.matmul_t(a, b, t);
    let s = g.add(q, r);
    let (f, keep) = fuse::fuse(&g, &[s]);
    let st = [("a", noise(54000, 1)), ("b", noise(45000, 2))];
    let got = run64(&f, &keep, &st);
    for i in 0..6 {
        for j in 0..5 {
            let want: f64 = (0..9000).map(|k| 3.0 * st[0].1[k * 6 + i] * st[1].1[k * 5 + j]).sum();
            assert!((got[0][i * 5 + j] - want).abs() < 1e-9);
        }
    }
}

#[test]
fn maps_and_reductions_on_the_device() {
    use super::testing::check_device;
    for (b, m, d) in [(3, 5, 4), (1, 1, 1), (7, 3, 8), (2, 9, 6)] {
        check_device(|g| {
            let (x, y) = (g.state("x", [b, m, d]), g.state("y", [m, 1]));
            let (z, w) = (g.state("z", [d]), g.state("w", [1]));
            let p = g.mul(x, y);
            let q = g.add(p, z);
            let r = g.relu(q);
            let s = g.mul(r, w);
            let t = g.unary(crate::ops::expr::Un::Sigmoid, s);
            let u = g.unary(crate::ops::expr::Un::Softplus, q);
            let v = g.mul(t, u);
            vec![v, g.sum_all(v), g.sum_axis(v, 1)]
        });
    }
    check_device(|g| {
        let x = g.state("x", [3000, 7]);
        let e = g.affine(x, 2.0, 1.0);
        vec![g.sum_axis(e, 0), g.sum_axis(e, 1), g.sum_all(e)]
    });
}

#[test]
fn products_on_the_device() {
    use super::testing::check_device;
    for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
        let t = Trans { a: ta, b: tb };
        let sw = |x: usize, y: usize, t: bool| if t { [y, x] } else { [x, y] };
        check_device(|g| {
            let (a, b) = (g.state("a", sw(13, 7, ta)), g.state("b", sw(7, 9, tb)));
            vec![g.matmul_t(a, b, t)]
        });
    }
    check_device(|g| {
        // slot mix, dense layer with epilogue, accumulation
        let (x, w) = (g.state("x", [5, 9, 12]), g.state("w", [9, 7]));
        let (v, b) = (g.state("v", [12, 8]), g.state("b", [8]));
        let u = g.slot_mix(x, w);
        let y = g.matmul(u, v);
        let y = g.add(y, b);
        let y = g.relu(y);
        let z = g.matmul(x, v);
        let z = g.slot_mix(z, w);
        vec![g.add(y, z)]
    });
    check_device(|g| {
        let (x, w) = (g.state("x", [6000, 8]), g.state("w", [8, 12]));
        vec![g.matmul(x, w)]
    });
}

/// Work of the host that hands on what it gets.
#[derive(Debug)]
struct Nothing;

impl crate::ops::host::HostWork for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }
    fn outputs(&self, inputs: &[crate::graph::Shape]) -> Vec<crate::graph::Shape> {
        inputs.to_vec()
    }
    fn start(&self, _: Vec<crate::graph::Array>) -> Box<dyn crate::ops::host::Pending> {
        unreachable!("not run")
    }
}

#[test]
fn nodes_have_roles_that_passes_keep() {
    let mut g = Graph::new();
    let w = g.state("w", [3, 2]);
    g.enter("head");
    g.enter("inner");
    let x = g.softmax(w);
    g.leave();
    let loss = g.sum_all(x);
    g.leave();
    let d = g.gradients(loss, &[w])[0];
    let d = g.host(std::sync::Arc::new(Nothing), &[d])[0];
    g.enter_as("update", Role::Update);
    g.enter("norm");
    let norm = g.sum_squares(&[d]);
    g.leave();
    g.leave();
    let (f, _) = fuse::fuse(&g, &[norm]);
    let mut twice = Graph::new();
    twice.append(&g, InputId::clone);
    for g in [&g, &f, &twice] {
        let of = |op: &str| -> Vec<(String, Role)> {
            let nodes = g.nodes().iter().filter(|n| n.op.name() == op);
            nodes.map(|n| (n.scope.to_string(), n.role)).collect()
        };
        let one = |scope: &str, role| vec![(scope.to_string(), role)];
        assert_eq!(of("softmax"), one("head.inner", Role::Forward));
        assert_eq!(of("softmax_grad"), one("head.inner", Role::Backward));
        assert_eq!(of("nothing"), one("", Role::Communication));
        assert_eq!(of("sum_squares"), one("update.norm", Role::Update));
    }
    let order: Vec<usize> = (0..g.nodes().len()).collect();
    let picture = dot::dot(&g, &order);
    assert!(
        picture.contains("label=\"head.inner\"") && picture.contains("label=\"head.inner'\""),
        "{picture}"
    );
}
