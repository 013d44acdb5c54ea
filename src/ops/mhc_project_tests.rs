//! Tests of [`super`].

use super::*;
use crate::graph::testing::check_device;
use crate::graph::tests::{check_vjp, noise, run64};
use crate::graph::{fuse, plan};

fn outputs(g: &mut Graph, s: Tensor, phi: Tensor, which: &[usize]) -> Vec<Tensor> {
    let o = g.mhc_project(s, phi);
    let all = [o.0, o.1, o.2, o.3];
    which.iter().map(|&i| all[i]).collect()
}

#[test]
fn equals_the_definition() {
    let (t, n, d) = (131, 3, 5);
    let (k, w) = (n * d, n * (n + 2));
    let mut g = Graph::new();
    let (s, phi) = (g.state("s", [t, n, d]), g.state("phi", [k, w]));
    let o = outputs(&mut g, s, phi, &[0, 1, 2, 3]);
    let (sv, pv) = (noise(t * k, 1), noise(k * w, 2));
    let got = run64(&g, &o, &[("s", sv.clone()), ("phi", pv.clone())]);
    for t in 0..t {
        let v = &sv[t * k..(t + 1) * k];
        for c in 0..w {
            let want: f64 = (0..k).map(|j| v[j] * pv[j * w + c]).sum();
            let have = match c {
                c if c < n => got[0][t * n + c],
                c if c < 2 * n => got[1][t * n + c - n],
                c => got[2][t * n * n + c - 2 * n],
            };
            assert!((want - have).abs() < 1e-12);
        }
        let ms = v.iter().map(|x| x * x).sum::<f64>() / k as f64;
        assert!((got[3][t] - ms).abs() < 1e-12);
    }
}

#[test]
fn adjoint_with_and_without_each_gradient() {
    for (t, n, d, which) in [
        (5, 1, 3, &[0, 1, 2, 3][..]),
        (3, 2, 5, &[0, 1, 2, 3]),
        (1, 4, 2, &[0, 1, 2, 3]),
        (130, 2, 2, &[0, 1, 2, 3]),
        (4, 3, 1, &[0, 1]),
        (4, 3, 2, &[2]),
        (4, 2, 3, &[3]),
        (4, 2, 3, &[0, 2, 3]),
        (4, 2, 3, &[1, 3]),
    ] {
        check_vjp(&[("s", vec![t, n, d]), ("phi", vec![n * d, n * (n + 2)])], |g, x| {
            outputs(g, x[0], x[1], which)
        });
    }
}

#[test]
fn gradient_accumulates_in_place() {
    let mut g = Graph::new();
    let (s0, phi) = (g.state("s", [150, 4, 3]), g.state("phi", [12, 24]));
    let s = g.affine(s0, 2.0, 0.0);
    let pre0 = g.state("pre", [150, 4]);
    let o = outputs(&mut g, s, phi, &[0, 1, 2, 3]);
    let u = g.stream_aggregate(s, pre0);
    let sums: Vec<Tensor> = o.iter().chain([&u]).map(|t| g.sum_all(*t)).collect();
    let loss = sums[1..].iter().fold(sums[0], |a, b| g.add(a, *b));
    let d = g.gradients(loss, &[s0]);
    let (f, keep) = fuse::fuse(&g, &d);
    let order = plan::live_nodes(&f, &keep);
    let p = plan::plan(&f, &keep, &|_| vec![], &|op| op.may_alias());
    let n = *order.iter().find(|&&n| f.nodes()[n].op.name() == "mhc_project_grad").unwrap();
    assert_eq!(f.nodes()[n].inputs.len(), 7, "accumulates");
    assert_eq!(p.in_place.get(&n), Some(&(6, 0)));
    let st = [("s", noise(1800, 1)), ("phi", noise(288, 2)), ("pre", noise(600, 3))];
    let (a, b) = (run64(&g, &d, &st), run64(&f, &keep, &st));
    for (a, b) in a[0].iter().zip(&b[0]) {
        assert!((a - b).abs() < 1e-11);
    }
}

#[test]
fn device() {
    for (t, n, d, which) in [
        (300, 4, 32, &[0, 1, 2, 3][..]),
        (257, 4, 7, &[0, 1, 3]),
        (129, 1, 1, &[0, 1, 2, 3]),
        (70, 8, 12, &[0, 1, 2, 3]),
        (65, 3, 5, &[0, 1, 2, 3]),
        (600, 2, 3, &[2]),
    ] {
        check_device(|g| {
            let (s0, phi) = (g.state("s", [t, n, d]), g.state("phi", [n * d, n * (n + 2)]));
            let s = g.affine(s0, 2.0, 0.0);
            let mut o = outputs(g, s, phi, which);
            o.push(g.mul(s, s));
            o
        });
    }
}

#[test]
fn shaders_are_valid() {
    for n in 1..=8 {
        for d in [3, 4] {
            for which in [&[0, 1, 2, 3][..], &[0, 1], &[2, 3]] {
                let mut g = Graph::new();
                let (s, phi) = (g.state("s", [70, n, d]), g.state("phi", [n * d, n * (n + 2)]));
                let o = outputs(&mut g, s, phi, which);
                let sums: Vec<Tensor> = o.iter().map(|t| g.sum_all(*t)).collect();
                let loss = sums[1..].iter().fold(sums[0], |a, b| g.add(a, *b));
                g.gradients(loss, &[s, phi]);
                let node = g.nodes().iter().find(|n| n.op.name() == "mhc_project_grad").unwrap();
                let (acc, mut ins) = (node.op.with_accumulate().unwrap(), node.inputs.clone());
                ins.push(s);
                g.push_arc(acc.into(), &ins);
                crate::ops::streams::tests::validate_graph(&g);
            }
        }
    }
}
