use super::*;
use crate::gpu::translate::translate;
use crate::graph::cpu::{CpuProgram, CpuState};
use crate::graph::exec::{Device, Program, State};
use crate::graph::testing::{noise, software_device};
use crate::graph::{Array, plan};
use crate::ops::Cost;
use crate::ops::host::{HostWork, Pending};
use std::sync::{Arc, Mutex};

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

fn devices() -> Vec<Device> {
    [Some(Device::Cpu), software_device()].into_iter().flatten().collect()
}

fn f32s(n: usize, seed: u64) -> Vec<f32> {
    noise(n, seed).iter().map(|x| *x as f32).collect()
}

/// What an f32 is once it was stored.
fn rounded(dtype: DType, x: f32) -> f32 {
    f32::from_bits(round::widen(dtype, round::narrow(dtype, x.to_bits())))
}

#[test]
fn shaders_validate() {
    use super::super::copy::tests::validated;
    for half in HALVES {
        for n in [6, 7] {
            for (from, to) in [(DType::F32, half), (half, DType::F32)] {
                for k in validated(&Cast { from, to }, &[&[n]]).kernels {
                    // for Metal and DirectX, too: no model has it yet, whose kernels are all looked at
                    let t = translate(&k).unwrap_or_else(|e| panic!("{e}"));
                    assert!(!t.spirv.is_empty() && !t.msl.is_empty() && !t.hlsl.is_empty());
                }
            }
        }
    }
}

/// Bits of every kind, there and back, the same on all executors: an odd number of them, more than one workgroup.
#[test]
fn the_same_bits_on_all_executors() {
    let mut bits: Vec<u32> = (0..4000u32).map(|i| i.wrapping_mul(0x9E37_79B9)).collect();
    let edges = [0, 1, 0x007F_FFFF, 0x0080_0000, 0x3300_0000, 0x3300_0001, 0x3380_0000, 0x387F_F000];
    let large = [
        0x477F_E000,
        0x477F_E001,
        0x477F_F000,
        0x7F7F_0000,
        0x7F7F_0001,
        0x7F7F_8000,
        0x7F7F_FFFF,
        0x7F80_0000,
    ];
    bits.extend(edges.iter().chain(&large).flat_map(|b| [*b, b | 0x8000_0000]));
    bits.push(0x3F80_8000);
    bits.retain(|b| !f32::from_bits(*b).is_nan());
    bits.truncate(bits.len() / 2 * 2 - 1);
    let x: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).collect();
    for half in HALVES {
        let want: Vec<u32> = x.iter().map(|x| rounded(half, *x).to_bits()).collect();
        for device in devices() {
            let mut g = Graph::new();
            let t = g.input("x", [x.len()]);
            let h = g.cast(t, half);
            let y = g.cast(h, DType::F32);
            let mut state = State::new(&device);
            let mut p = Program::compile(&device, &state, &g, &[h, y], "cast").unwrap();
            p.set("x", &x).unwrap();
            p.run(&mut state).unwrap();
            for got in pollster::block_on(p.read(&[0, 1])).unwrap() {
                let got: Vec<u32> = got.iter().map(|x| x.to_bits()).collect();
                assert_eq!(got, want, "{half:?} on {}", device.name());
            }
        }
    }
}

/// Takes halves as they are stored, and hands them on the other way round.
#[derive(Debug)]
struct Reverse {
    seen: Arc<Mutex<Vec<Array>>>,
}

struct Done(Array);

impl HostWork for Reverse {
    fn name(&self) -> &'static str {
        "reverse"
    }
    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        inputs.to_vec()
    }
    fn storage(&self, inputs: &[DType], _: usize) -> Vec<DType> {
        inputs.to_vec()
    }
    fn start(&self, mut inputs: Vec<Array>) -> Box<dyn Pending> {
        self.seen.lock().unwrap().extend(inputs.clone());
        let mut a = inputs.pop().expect("one");
        match &mut a {
            Array::H(_, v) => v.reverse(),
            other => panic!("{other:?} are no halves"),
        }
        Box::new(Done(a))
    }
}

impl Pending for Done {
    fn wait(self: Box<Self>) -> Result<Vec<Array>, String> {
        Ok(vec![self.0])
    }
}

/// Input, state, computed value and work of the host in 16 bits: what each holds, moves and gives back.
#[test]
fn halves_take_half_the_bytes_everywhere() {
    const N: usize = 5001;
    for half in HALVES {
        for device in devices() {
            let mut g = Graph::new();
            let (x, s) = (g.input_stored("x", [N], half), g.state_stored("s", [N], half));
            let (wide, kept) = (g.cast(x, DType::F32), g.cast(s, DType::F32));
            let sum = g.add(wide, kept);
            let h = g.cast(sum, half);
            let seen = Arc::new(Mutex::new(vec![]));
            let back = g.host(Arc::new(Reverse { seen: seen.clone() }), &[h])[0];
            let y = g.cast(back, DType::F32);
            let keep = [h, back, y, x];
            let costs = |op: &str| -> Vec<Cost> {
                let nodes = g.nodes().iter().filter(|n| n.op.name() == op);
                nodes.map(|n| g.cost(n)).collect()
            };
            assert_eq!(costs("cast").len(), 4);
            for cost in costs("cast") {
                assert_eq!(
                    cost.read + cost.written,
                    6.0 * N as f64,
                    "four bytes on one side, two on the other"
                );
            }
            let cost = costs("reverse")[0];
            assert_eq!((cost.read, cost.written), (2.0 * N as f64, 2.0 * N as f64));

            let (a, b) = (f32s(N, 3), f32s(N, 4));
            let mut state = State::new(&device);
            state.set_stored("s", half, &vec![0.0; N]).unwrap();
            state.set("s", &b).unwrap();
            let mut p = Program::compile(&device, &state, &g, &keep, "halves").unwrap();
            // of the computed values two are in 16 bits (whole words), four in 32
            let (two, four) = (half.bytes(N), 4 * N);
            assert_eq!(two, 2 * N + 2);
            assert_eq!(p.plan().unshared, 2 * two + 4 * four);
            // the sum lies over one of what it reads, h where the other was, what came back over the sum
            assert_eq!(p.plan().buffers, [four; 3]);
            assert_eq!(p.plan().peak(), 3 * four);
            let mut last = vec![];
            for round in 0..2 {
                p.set("x", &a).unwrap();
                p.run(&mut state).unwrap();
                let v = pollster::block_on(p.read(&[0, 1, 2, 3])).unwrap();
                let exact: Vec<f32> = a
                    .iter()
                    .zip(&b)
                    .map(|(a, b)| rounded(half, rounded(half, *a) + rounded(half, *b)))
                    .collect();
                assert_eq!(v[0], exact, "{half:?} on {}, round {round}", device.name());
                let reversed: Vec<f32> = exact.iter().rev().copied().collect();
                assert_eq!([&v[1], &v[2]], [&reversed, &reversed]);
                assert_eq!(v[3], a.iter().map(|x| rounded(half, *x)).collect::<Vec<_>>());
                last = exact;
            }
            let want = Array::<f32>::of(half, last.into_iter());
            assert_eq!(*seen.lock().unwrap(), [want.clone(), want], "the host's work gets 16 bits");
            let s = pollster::block_on(state.get(&["s"])).unwrap().remove(0);
            assert_eq!(s, b.iter().map(|x| rounded(half, *x)).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_plan_counts_the_bytes_of_each_type() {
    for half in HALVES {
        for device in devices() {
            let mut g = Graph::new();
            let (x, z) = (g.input("x", [10, 999]), g.input("z", [7]));
            let keep = [g.cast(x, half), g.cast(z, half), g.affine(z, 2.0, 0.0)];
            let p = Program::compile(&device, &State::new(&device), &g, &keep, "plan").unwrap();
            let mut bytes = p.plan().buffers.clone();
            bytes.sort_unstable();
            assert_eq!(bytes, [16, 28, 2 * 9990]);
            assert_eq!((p.plan().peak(), p.plan().unshared), (20_024, 20_024));
        }
    }
}

/// A state of another type than the graph's is a bug of the caller's, not a matter of bits.
#[test]
#[should_panic(expected = "state s")]
fn a_state_of_another_type_is_not_read() {
    let mut g = Graph::new();
    let s = g.state_stored("s", [4], DType::BF16);
    let y = g.cast(s, DType::F32);
    let mut p = CpuProgram::<f32>::new(g, &[y]);
    p.run(&mut CpuState { values: [("s".into(), vec![0.0; 4].into())].into() });
}

#[test]
#[should_panic(expected = "map does not read Some(F16): put a cast before it")]
fn arithmetic_takes_no_halves() {
    let mut g = Graph::new();
    let x = g.input_stored("x", [4], DType::F16);
    g.add(x, x);
}

/// Through a rounded value the gradient is that of the sum of what reads it, rounded once a reader and once in all.
#[test]
fn gradients_are_stored_as_their_values() {
    for half in HALVES {
        let mut g = Graph::new();
        let x = g.state("x", [7]);
        let h = g.cast(x, half);
        let (a, b) = (g.cast(h, DType::F32), g.cast(h, DType::F32));
        let (wa, wb) = (g.constant([7], noise(7, 1)), g.constant([7], noise(7, 2)));
        let (a, b) = (g.mul(a, wa), g.mul(b, wb));
        let y = g.add(a, b);
        let loss = g.sum_all(y);
        let d = g.gradients(loss, &[x, h]);
        assert_eq!(d.iter().map(|d| g.value(*d).dtype).collect::<Vec<_>>(), [DType::F32, half]);
        let mut p = CpuProgram::<f32>::new(g.clone(), &d);
        plan::verify(&g, &d, p.plan()).unwrap();
        p.run(&mut CpuState { values: [("x".into(), f32s(7, 9).into())].into() });
        let want: Vec<f32> = f32s(7, 1)
            .iter()
            .zip(f32s(7, 2))
            .map(|(a, b)| rounded(half, rounded(half, *a) + rounded(half, b)))
            .collect();
        assert_eq!(p.read(d[0]), want);
        assert_eq!(p.read(d[1]), want);
    }
}
