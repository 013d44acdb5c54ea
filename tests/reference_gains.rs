//! Gains and composites against `mhc.json`: signed sums, later layers on the left.

use birkhoff::diagnose::Matrix;
use birkhoff::diagnose::matrix::composites;
use birkhoff::diagnose::measure::{LayerRes, residual};
use serde_json::Value;
use std::path::PathBuf;

fn reference() -> Option<Value> {
    let dir = std::env::var_os("BIRKHOFF_REFERENCE")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/reference"), PathBuf::from);
    let file = dir.join("mhc.json");
    let Ok(text) = std::fs::read_to_string(&file) else {
        println!("SKIP: no {}", file.display());
        return None;
    };
    Some(serde_json::from_str(&text).expect("valid JSON"))
}

fn matrix(v: &Value) -> Matrix {
    let rows = v.as_array().expect("rows");
    let m = rows.iter().flat_map(|r| r.as_array().expect("a row")).map(|x| x.as_f64().expect("a number"));
    Matrix::new(rows.len(), m.collect())
}

fn close(got: f64, want: &Value, what: &str) {
    let want = want.as_f64().expect("a number");
    assert!((got - want).abs() <= 1e-9 * want.abs().max(1.0), "{what}: {got}, reference {want}");
}

fn check(m: &Matrix, want: &Value, what: &str) {
    close(m.forward_gain(), &want["fwd_amax"], &format!("{what} forward"));
    close(m.backward_gain(), &want["bwd_amax"], &format!("{what} backward"));
    close(m.singular_values()[0], &want["spectral_norm"], &format!("{what} spectral norm"));
}

#[test]
fn reference_gains_and_composites() {
    let Some(all) = reference() else { return };
    let mut stacks = 0;
    for (name, case) in all["gains"].as_object().expect("cases") {
        let Some(h) = case.get("H").and_then(Value::as_array) else { continue };
        stacks += 1;
        let layers: Vec<Matrix> = h.iter().map(matrix).collect();
        let (single, to_last) = (&case["single"], &case["composite_l_to_L"]);
        let all_pairs = composites(&layers);
        for (l, m) in layers.iter().enumerate() {
            check(m, &single[l], &format!("{name} layer {l}"));
        }
        for want in to_last.as_array().expect("composites") {
            let l = want["from_l"].as_u64().expect("a layer") as usize;
            let m = all_pairs[l].last().expect("to the last layer");
            for (x, y) in m.data().iter().zip(matrix(&want["M"]).data()) {
                assert!((x - y).abs() <= 1e-9 * y.abs().max(1.0), "{name} from {l}: {x}, reference {y}");
            }
            check(m, want, &format!("{name} composite from {l}"));
        }
        // the same through the path that a training run takes, in f32 per token
        let n = layers[0].n();
        let tokens: Vec<Vec<f32>> =
            layers.iter().map(|m| m.data().iter().chain(m.data()).map(|&x| x as f32).collect()).collect();
        let list: Vec<LayerRes<'_>> =
            tokens.iter().map(|t| LayerRes { res: Some(t), changes_slots: false }).collect();
        let report = residual(n, &list);
        for want in to_last.as_array().expect("composites") {
            let l = want["from_l"].as_u64().expect("a layer") as usize;
            let b = want["bwd_amax"].as_f64().expect("a number");
            assert!(
                (report.backward[l] - b).abs() <= 1e-5 * b.max(1.0),
                "{name}: {} {b}",
                report.backward[l]
            );
        }
    }
    assert!(stacks > 0, "the reference lists stacks of matrices");
}

#[test]
fn reference_order_of_layers() {
    let Some(all) = reference() else { return };
    let case = &all["gains"]["order_check"];
    let (h0, h1) = (matrix(&case["H0"]), matrix(&case["H1"]));
    let c = composites(&[h0.clone(), h1.clone()]);
    assert_eq!(c[0][1], matrix(&case["H1@H0"]));
    check(&c[0][1], &case["gains_H1@H0"], "H1·H0");
    check(&(&h0 * &h1), &case["gains_H0@H1_WRONG"], "H0·H1");
    assert_ne!(c[0][1].forward_gain(), (&h0 * &h1).forward_gain());
}
