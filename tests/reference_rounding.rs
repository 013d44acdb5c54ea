//! Rounding to 16 bits against `more/rounding.safetensors`: bit for bit, on every executor.

use birkhoff::graph::exec::{Device, Program, State};
use birkhoff::graph::testing::software_device;
use birkhoff::graph::{DType, Graph};
use birkhoff::ops::round::{narrow, narrow_stochastic, widen};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::PathBuf;

/// One case: the type, and named patterns.
struct Case {
    name: String,
    to: DType,
    stochastic: bool,
    bits: Vec<u32>,
    random: Vec<u32>,
    out: Vec<u16>,
    widened: Vec<u32>,
}

fn cases() -> Option<Vec<Case>> {
    let dir = std::env::var_os("BIRKHOFF_REFERENCE")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/reference"), PathBuf::from)
        .join("more");
    let Ok(text) = std::fs::read(dir.join("index.json")) else {
        println!("SKIP: no reference values in {} (set BIRKHOFF_REFERENCE)", dir.display());
        return None;
    };
    let index: Value = serde_json::from_slice(&text).expect("valid JSON");
    let bytes = std::fs::read(dir.join("rounding.safetensors")).expect("beside the index");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let mut out = vec![];
    for case in index["cases"].as_array().expect("cases").iter().filter(|c| c["op"] == "round") {
        let name = case["name"].as_str().expect("a name");
        let tensor = |what: &str| -> Vec<u32> {
            let view = file.tensor(&format!("{name}/{what}"));
            let words = |data: &[u8]| {
                data.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            };
            view.map_or(vec![], |v| words(v.data()))
        };
        let options = &case["options"];
        out.push(Case {
            name: name.into(),
            to: if options["to"] == "f16" { DType::F16 } else { DType::BF16 },
            stochastic: options["mode"] == "stochastic",
            bits: tensor("bits"),
            random: tensor("random"),
            out: tensor("out").into_iter().map(|x| x as u16).collect(),
            widened: tensor("widened"),
        });
    }
    let kinds = |to, stochastic| out.iter().filter(|c| c.to == to && c.stochastic == stochastic).count();
    for to in [DType::F16, DType::BF16] {
        assert!(kinds(to, false) > 0 && kinds(to, true) > 0, "both ways of {to:?}");
    }
    Some(out)
}

fn is_nan(to: DType, half: u16) -> bool {
    f32::from_bits(widen(to, half)).is_nan()
}

#[test]
fn reference_rounding() {
    for c in cases().unwrap_or_default() {
        assert!(
            !c.bits.is_empty() && c.out.len() == c.bits.len() && c.widened.len() == c.bits.len(),
            "{}",
            c.name
        );
        for (i, &bits) in c.bits.iter().enumerate() {
            let got = match c.stochastic {
                true => narrow_stochastic(c.to, bits, c.random[i]),
                false => narrow(c.to, bits),
            };
            let want = c.out[i];
            let same = got == want || is_nan(c.to, got) && is_nan(c.to, want);
            assert!(same, "{} {bits:#010x}: {got:#06x}, reference {want:#06x}", c.name);
            if !is_nan(c.to, want) {
                assert_eq!(widen(c.to, want), c.widened[i], "{} {want:#06x}", c.name);
            }
        }
    }
}

/// The same through `cast`, there and back.
#[test]
fn reference_rounding_in_a_graph() {
    let devices: Vec<Device> = [Some(Device::Cpu), software_device()].into_iter().flatten().collect();
    for c in cases().unwrap_or_default().iter().filter(|c| !c.stochastic) {
        for device in &devices {
            let mut g = Graph::new();
            let x = g.input("x", [c.bits.len()]);
            let half = g.cast(x, c.to);
            let y = g.cast(half, DType::F32);
            let mut state = State::new(device);
            let mut p = Program::compile(device, &state, &g, &[y], "cast").expect("compiles");
            let x: Vec<f32> = c.bits.iter().map(|b| f32::from_bits(*b)).collect();
            p.set("x", &x).expect("uploaded");
            p.run(&mut state).expect("runs");
            let got = pollster::block_on(p.read(&[0])).expect("read").remove(0);
            for (i, y) in got.iter().enumerate() {
                let want = f32::from_bits(c.widened[i]);
                let same = y.to_bits() == want.to_bits() || y.is_nan() && want.is_nan();
                assert!(same, "{} {:#010x} on {}: {y}, reference {want}", c.name, c.bits[i], device.name());
            }
        }
    }
}
