//! One training step after another at the default learning rates, on the CPU and on a Vulkan device, each step
//! from the CPU's state: losses, gradient norms and the moments of every parameter agree all along a run, without
//! the growth of roundings that two free-running runs show at these rates.

use birkhoff::graph::exec::{Device, Program, State};
use birkhoff::graph::testing::software_device;
use birkhoff::graph::{Slot, StateId};
use birkhoff::model::build::{EmbeddingSpec, FeatureSpec, model, table_inputs};
use birkhoff::model::config::Config;
use birkhoff::ops::sparse_index::SparseIndex;
use birkhoff::train::step::{GUARD, RUNNING, TrainingStep, hyper, training_step};

const ROWS: usize = 40;
const COLUMNS: usize = 26;
const STEPS: usize = 50;

/// Numbers that do not repeat soon.
struct Lcg(u64);

impl Lcg {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    fn unit(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 31) as f32
    }
}

/// A batch whose labels depend on its categories and on its first number.
struct Batch {
    ids: Vec<u32>,
    numeric: Vec<f32>,
    label: Vec<f32>,
}

impl Batch {
    fn random(b: usize, x: &mut Lcg) -> Self {
        // low ids are frequent
        let id =
            |i: usize, x: &mut Lcg| (i % COLUMNS * ROWS) as u32 + (x.unit() * x.unit() * ROWS as f32) as u32;
        let ids: Vec<u32> = (0..b * COLUMNS).map(|i| id(i, x)).collect();
        let numeric: Vec<f32> = (0..b * COLUMNS).map(|_| x.unit()).collect();
        let effect = |id: u32| ((id.wrapping_mul(2_654_435_761) >> 16) % 100) as f32 / 100.0 - 0.5;
        let label = (0..b)
            .map(|i| {
                let s: f32 = ids[i * COLUMNS..][..COLUMNS].iter().map(|&id| effect(id)).sum();
                let s = s + 2.0 * numeric[i * COLUMNS] - 2.0;
                f32::from(x.unit() < 1.0 / (1.0 + (-s).exp()))
            })
            .collect();
        Batch { ids, numeric, label }
    }

    fn upload(&self, p: &mut Program) {
        let (n, index) = (table_inputs(0), SparseIndex::plain(&self.ids));
        p.set_ids(&n.ids, &self.ids).unwrap();
        p.set_ids(&n.order, &index.order).unwrap();
        p.set_ids(&n.segments, &index.segments).unwrap();
        p.set_ids(&n.unique, &index.unique).unwrap();
        p.set("numeric", &self.numeric).unwrap();
        p.set("label", &self.label).unwrap();
        p.set("weight", &vec![1.0; self.label.len()]).unwrap();
    }
}

fn state(step: &TrainingStep, device: &Device) -> State {
    let mut s = State::new(device);
    for p in &step.params {
        s.set(&p.name, &p.initial(1)).unwrap();
    }
    for (n, len) in &step.optimizer {
        s.set(n, &vec![0.0; *len]).unwrap();
    }
    s.set(RUNNING, &[0.0]).unwrap();
    s.set(GUARD, &[0.0; 2]).unwrap();
    s
}

fn norm(v: impl Iterator<Item = f32>) -> f64 {
    v.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

#[test]
fn every_step_of_a_default_run_agrees_between_cpu_and_vulkan() {
    let Some(device) = software_device() else { return };
    for mode in ["mhc", "hc", "shortcut"] {
        let cfg =
            Config::load(None, &["train.batch=64".into(), format!("model.residual.mode={mode}")]).unwrap();
        let columns = (1..=COLUMNS).map(|c| (format!("C{c}"), ROWS)).collect();
        let f =
            FeatureSpec { numeric: COLUMNS, tables: vec![EmbeddingSpec { columns, ..Default::default() }] };
        let m = model(&cfg.model, &f, cfg.train.batch, true, cfg.train.embedding_init, -1.0).unwrap();
        let step = training_step(m, &cfg.train);
        let keep = [step.loss, step.norm2];
        let (mut s, mut t) = (state(&step, &Device::Cpu), state(&step, &device));
        let mut p = Program::compile(&Device::Cpu, &s, &step.graph, &keep, "cpu").unwrap();
        let mut q = Program::compile(&device, &t, &step.graph, &keep, "vulkan").unwrap();
        let params = step.params.iter().map(|p| p.id());
        let all: Vec<StateId> = params.chain(step.optimizer.iter().map(|o| o.0.clone())).collect();
        let moments: Vec<&StateId> = all.iter().filter(|id| id.slot == Some(Slot::M)).collect();
        let mut x = Lcg(12345);
        let (mut losses, mut worst) = (vec![], [0.0f64; 3]);
        for k in 0..STEPS {
            let before = pollster::block_on(s.get(&all)).unwrap();
            for (n, v) in all.iter().zip(&before) {
                t.set(n, v).unwrap();
            }
            let batch = Batch::random(cfg.train.batch, &mut x);
            let h = hyper(&cfg.train, k as u64 + 1, ((k + 1) as f64 / 20.0).min(1.0));
            let run = |p: &mut Program, s: &mut State| {
                batch.upload(p);
                p.set("hyper", &h).unwrap();
                p.run(s).unwrap();
                let v = pollster::block_on(p.read(&[0, 1])).unwrap();
                (f64::from(v[0][0]), f64::from(v[1][0]).sqrt(), pollster::block_on(s.get(&moments)).unwrap())
            };
            let (a, b) = (run(&mut p, &mut s), run(&mut q, &mut t));
            losses.push(a.0);
            worst[0] = worst[0].max((a.0 - b.0).abs() / a.0);
            worst[1] = worst[1].max((a.1 - b.1).abs() / a.1);
            // All gradients as one vector: a moment that is rounding alone (the key bias, layer 0's res) would
            // say nothing beside itself.
            let total = norm(a.2.iter().flatten().copied());
            let apart = a.2.iter().flatten().zip(b.2.iter().flatten()).map(|(x, y)| x - y);
            worst[2] = worst[2].max(norm(apart) / total);
        }
        println!(
            "{mode}: worst relative difference of loss {:.1e}, gradient norm {:.1e}, moments {:.1e}",
            worst[0], worst[1], worst[2]
        );
        let mean = |l: &[f64]| l.iter().sum::<f64>() / l.len() as f64;
        assert!(mean(&losses[40..]) < mean(&losses[..10]), "it learns: {losses:?}");
        assert!(worst[0] < 1e-5 && worst[1] < 1e-3 && worst[2] < 1e-2, "{mode}: {worst:?}");
    }
}
