//! A loss or a gradient that is no longer a finite number: which step it was, and which tensor came first.
//!
//! [`crate::ops::guard`] keeps the state on the device as it was before the first bad step, whatever the host does
//! until it looks. So the step can be taken again: on the CPU, operation by operation, without fusion, with a look at
//! every result.

use super::infer::{Together, upload_step};
use super::step::{GUARD, HYPER, training_step};
use super::trainer::Trainer;
use crate::data::batch::Batch;
use crate::data::feed::Feed;
use crate::graph::cpu::{BadValue, CpuProgram, CpuState};
use crate::graph::exec::{Program, State};
use crate::graph::{Array, Role, StateId};
use crate::model::config::TrainConfig;
use anyhow::{anyhow, bail};

/// The remedies.
const TRY: &str = "lower train.lr or train.embedding_lr, or set train.clip";

/// Training that looks at every operation's result (`--debug-nan`).
pub struct Watched {
    program: Program,
}

impl Trainer {
    /// Looks at the result of every operation of every step. On a device only the loss and the norm of the gradient
    /// are looked at, but after every step.
    pub fn watch_every_operation(&mut self) -> anyhow::Result<()> {
        if self.ranks.is_some() {
            bail!("--debug-nan looks at one rank's operations; train without other ranks for it");
        }
        self.watched = Some(Watched { program: self.plain_program()? });
        Ok(())
    }

    /// The training step for the CPU, operation by operation as the model was built.
    fn plain_program(&self) -> anyhow::Result<Program> {
        let t = &self.cfg.train;
        let step = training_step(self.inputs.model(&self.cfg, t.batch, true)?, t);
        let keep = vec![step.loss, step.norm2];
        Ok(Program::Cpu(Box::new(CpuProgram::new(step.graph, &keep)), keep))
    }

    /// An error if a step so far was bad. On the CPU this costs nothing; on a device it waits.
    pub(super) async fn check_finite(&mut self, train: &Feed) -> anyhow::Result<()> {
        let guard = self.state.view(&[GUARD]).await?;
        let (low, high) = (guard[0][0] as u64, guard[0][1] as u64);
        drop(guard);
        match low + (high << 16) {
            0 => Ok(()),
            step => Err(self.explain(step, train).await?),
        }
    }

    /// Whether the next step has anything that is not finite before its update; run before the step itself.
    pub(super) async fn watch(&mut self, batches: &[Batch], hyper: [f32; HYPER]) -> anyhow::Result<()> {
        let Some(mut watched) = self.watched.take() else { return Ok(()) };
        let (t, step) = (&self.cfg.train, self.progress.step);
        let found = match &mut self.state {
            State::Cpu(state) => first_bad(&mut watched.program, state, batches, t, step, hyper)?,
            State::Gpu(_) => None,
        };
        self.watched = Some(watched);
        match found {
            Some(bad) => Err(self.sentence(self.progress.step, &bad)),
            None => Ok(()),
        }
    }

    /// The error that tells of a bad step: the state is still the one before it.
    async fn explain(&mut self, step: u64, train: &Feed) -> anyhow::Result<anyhow::Error> {
        if self.ranks.is_some() {
            return Ok(anyhow!(
                "step {step}: the loss or its gradient is not finite; {}; {TRY}; trained by one rank alone it says which \
                 tensor came first",
                self.kept()
            ));
        }
        let ids: Vec<StateId> = self.saved.iter().map(|s| s.id.clone()).collect();
        let values = self.state.get(&ids).await?;
        let mut state = CpuState { values: ids.into_iter().zip(values.into_iter().map(Array::F)).collect() };
        state.values.insert(GUARD.into(), vec![0.0; 2].into());
        if let Some(line) = self.bad_state(&state, step) {
            return Ok(line);
        }
        // every look comes before the end of an epoch: the step's batch is one of the last
        let back = self.progress.step - step + 1;
        let k = self.cfg.train.accumulate as u64;
        let at = self.progress.batch.div_ceil(k).saturating_sub(back) * k;
        let loader = self.train_batches(train, self.progress.epoch, at)?;
        let batches = loader.take(k as usize).collect::<Result<Vec<Batch>, _>>()?;
        if batches.is_empty() {
            bail!("the batch of step {step} is not there any more");
        }
        let rows = batches.iter().map(|b| b.rows).sum();
        let mut program = self.plain_program()?;
        let hyper = self.hyper(step, rows);
        let found = first_bad(&mut program, &mut state, &batches, &self.cfg.train, step, hyper)?;
        Ok(match found {
            Some(bad) => self.sentence(step, &bad),
            None => anyhow!(
                "step {step}: the loss or its gradient is not finite on {}; on the CPU the same step is, operation by \
                 operation: it goes beyond the range of this device; {}; {TRY}",
                self.device.name(),
                self.kept()
            ),
        })
    }

    /// An error that names the first parameter or optimiser state with a number that is not finite.
    fn bad_state(&self, state: &CpuState<f32>, step: u64) -> Option<anyhow::Error> {
        let mut all = self.saved.iter().map(|s| (s, state.values[&s.id].floats()));
        let (s, v) = all.find(|(_, v)| v.iter().any(|x| !x.is_finite()))?;
        Some(self.bad_parameter(&s.id, &v, step))
    }

    /// The same of the state as it is: the update of the last step has made it.
    pub(super) async fn check_state(&self) -> anyhow::Result<()> {
        if self.ranks.is_some() {
            return Ok(());
        }
        let ids: Vec<&StateId> = self.saved.iter().map(|s| &s.id).collect();
        let values = self.state.view(&ids).await?;
        ids.iter().zip(&values).try_for_each(|(id, v)| self.check_value(id, v))
    }

    /// The same of one value of the state.
    pub(super) fn check_value(&self, id: &StateId, v: &[f32]) -> anyhow::Result<()> {
        match v.iter().all(|x| x.is_finite()) {
            true => Ok(()),
            false => Err(self.bad_parameter(id, v, self.progress.step + 1)),
        }
    }

    fn bad_parameter(&self, id: &StateId, v: &[f32], step: u64) -> anyhow::Error {
        let bad = v.iter().filter(|x| !x.is_finite()).count();
        let when = match step {
            0 | 1 => "from the start".into(),
            s => format!("since the update of step {}", s - 1),
        };
        anyhow!(
            "step {step}: first not finite is `{id}`, {bad} of {} values, {when}; {}; {TRY}",
            v.len(),
            self.kept()
        )
    }

    fn sentence(&self, step: u64, bad: &BadValue) -> anyhow::Error {
        let scope = &bad.scope;
        let pass = match bad.role {
            Role::Forward => " (forward)",
            Role::Backward => " (backward)",
            Role::Update | Role::Communication => "",
        };
        let place = if scope.is_empty() { String::new() } else { format!(" in {scope}{pass}") };
        let largest = bad.largest.as_ref();
        let from = largest.map_or(String::new(), |(t, v)| format!(" from {t} of up to {v:.1e}"));
        anyhow!(
            "step {step}: first not finite is {}, {} of {} values, made by {}{place}{from}; {}; {TRY}",
            bad.tensor,
            bad.bad,
            bad.of,
            bad.op,
            self.kept()
        )
    }

    /// What there is to go on from.
    fn kept(&self) -> String {
        match (self.kept_step, &self.progress.best) {
            (Some(c), _) => format!("the checkpoint of step {c} is kept"),
            (None, Some(b)) => format!("the weights of step {} are kept", b.step),
            (None, None) => "nothing was saved yet".into(),
        }
    }
}

/// Runs a step up to its update.
fn first_bad(
    program: &mut Program,
    state: &mut CpuState<f32>,
    batches: &[Batch],
    cfg: &TrainConfig,
    step: u64,
    hyper: [f32; HYPER],
) -> anyhow::Result<Option<BadValue>> {
    for batch in batches {
        let floats = [("numeric", &batch.numeric), ("label", &batch.labels), ("weight", &batch.weights)];
        for (name, v) in floats {
            let bad = v.iter().filter(|x| !x.is_finite()).count();
            if bad > 0 {
                return Ok(Some(BadValue {
                    tensor: format!("the input `{name}`"),
                    op: "the data",
                    scope: String::new(),
                    role: Role::Forward,
                    largest: None,
                    bad,
                    of: v.len(),
                }));
            }
        }
    }
    let together = Together::new(batches, cfg.accumulate, None);
    upload_step(program, batches, together, cfg, step, None)?;
    program.set("hyper", &hyper)?;
    match program {
        Program::Cpu(p, _) => Ok(p.first_bad(state)),
        Program::Gpu(..) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::criteo::{self, ReadOptions, RowPolicy};
    use crate::data::loader::permutation;
    use crate::data::rows::Dataset;
    use crate::data::schema::{Encoding, Schema, Transform};
    use crate::data::synth::{DEFAULT_WORLD, Synth};
    use crate::graph::Slot;
    use crate::graph::exec::Device;
    use crate::graph::testing::software_device;
    use crate::model::config::Config;
    use crate::train::infer::Inputs;
    use crate::train::store::MemoryStore;
    use std::sync::Arc;

    struct World {
        data: Arc<Dataset>,
        encoder: Arc<crate::data::FittedEncoder>,
    }

    fn world() -> World {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("rows.tsv");
        Synth::new(DEFAULT_WORLD, 7).write_file(&file, 320).unwrap();
        let schema = Schema::criteo(Transform::Log, true, Encoding::Hash { buckets: 20 });
        let (encoder, _) = criteo::fit(&file, &schema, RowPolicy::Error).unwrap();
        let data = criteo::load(&file, &encoder, ReadOptions::default()).unwrap();
        World { data: Arc::new(data), encoder: Arc::new(encoder) }
    }

    impl World {
        fn trainer(&self, sets: &[&str], device: &Device) -> Trainer {
            let small = ["model.layers=2", "model.width=8", "train.batch=32", "train.eval_batch=64"];
            let sets: Vec<String> = small.iter().chain(sets).map(|s| s.to_string()).collect();
            let cfg = Config::load(None, &sets).unwrap();
            let inputs = Inputs::new(self.encoder.clone(), &cfg, device).unwrap();
            Trainer::new(&cfg, inputs, device, self.data.rows.len()).unwrap()
        }

        fn fails(&self, t: &mut Trainer) -> String {
            let (mut store, mut nobody) = (MemoryStore::default(), ());
            let run = t.run(self.data.clone(), self.data.clone(), &mut store, &mut nobody);
            let e = pollster::block_on(run).expect_err("it goes wrong").to_string();
            assert!(!e.contains('\n') && e.contains("train.lr"), "{e}");
            e
        }
    }

    fn set(t: &mut Trainer, name: &str, at: usize, value: f32) {
        let mut v = pollster::block_on(t.state.get(&[name])).unwrap().remove(0);
        v[at] = value;
        t.state.set(name, &v).unwrap();
    }

    #[test]
    fn a_planted_weight_is_named_and_the_state_is_that_before_the_step() {
        let world = world();
        for device in [Some(Device::Cpu), software_device()].into_iter().flatten() {
            // looked at after step 6 on a device
            let mut t = world.trainer(&["train.log_every=6", "train.diagnose_every=0"], &device);
            set(&mut t, "head.w0", 3, f32::INFINITY);
            let w0 = StateId::from("head.w0");
            let names = [w0.clone(), w0.beside(Slot::M), "embeddings.0".into()];
            let before = pollster::block_on(t.state.get(&names)).unwrap();
            let e = world.fails(&mut t);
            assert!(e.starts_with("step 1: first not finite is `head.w0`, 1 of "), "{e}");
            assert!(e.contains("from the start") && e.contains("nothing was saved"), "{e}");
            let after = pollster::block_on(t.state.get(&names)).unwrap();
            assert_eq!(before, after, "{}", device.name());

            // finite itself, but not what it is multiplied with
            let mut t = world.trainer(&["train.log_every=6", "train.diagnose_every=0"], &device);
            (0..64).for_each(|i| set(&mut t, "layers.1.attention.wk", i, 3e38));
            let e = world.fails(&mut t);
            assert!(e.starts_with("step 1: first not finite is layers.1.attention:matmul"), "{e}");
            assert!(e.contains("made by matmul in layers.1.attention (forward)"), "{e}");
        }
    }

    #[test]
    fn the_backward_pass_is_said_in_words() {
        let t = world().trainer(&[], &Device::Cpu);
        let bad = BadValue {
            tensor: "layers.0.attention:matmul.2 [8, 8]".into(),
            op: "matmul",
            scope: "layers.0.attention".into(),
            role: Role::Backward,
            largest: Some(("head:map.0 [8]".into(), 3e38)),
            bad: 1,
            of: 64,
        };
        let text = t.sentence(7, &bad).to_string();
        assert!(
            text.starts_with(
                "step 7: first not finite is layers.0.attention:matmul.2 [8, 8], 1 of 64 values, made by matmul in \
                 layers.0.attention (backward) from head:map.0 [8] of up to 3.0e38; "
            ),
            "{text}"
        );
    }

    #[test]
    fn a_bad_input_is_found_at_the_step_that_takes_it() {
        let mut world = world();
        let mut data = (*world.data).clone();
        let row = permutation(320, 1, 0)[32 * 6 + 5] as usize;
        data.rows.numeric[row * data.rows.features + 2] = f32::NAN;
        world.data = Arc::new(data);
        for device in [Some(Device::Cpu), software_device()].into_iter().flatten() {
            let mut t = world.trainer(&["train.log_every=9", "train.diagnose_every=0"], &device);
            let e = world.fails(&mut t);
            assert!(e.starts_with("step 7: first not finite is the input `numeric`, 1 of "), "{e}");
        }
    }

    #[test]
    fn what_never_reaches_the_loss_is_found_on_request() {
        let world = world();
        let mut t = world.trainer(&["train.diagnose_every=0"], &Device::Cpu);
        t.watch_every_operation().unwrap();
        // relu(-inf) = 0
        set(&mut t, "head.b0", 2, f32::NEG_INFINITY);
        let e = world.fails(&mut t);
        assert!(e.starts_with("step 1: first not finite is head:map") && e.contains("32 of 2048"), "{e}");
        // and nothing is found where nothing is wrong
        let sets = ["train.diagnose_every=0", "train.log_every=1"];
        let losses = |watch: bool| {
            let mut t = world.trainer(&sets, &Device::Cpu);
            if watch {
                t.watch_every_operation().unwrap();
            }
            let (mut store, mut nobody) = (MemoryStore::default(), ());
            let run = t.run(world.data.clone(), world.data.clone(), &mut store, &mut nobody);
            pollster::block_on(run).unwrap();
            store.records.iter().map(|r| r["loss"].clone()).collect::<Vec<_>>()
        };
        assert_eq!(losses(true), losses(false), "looking changes nothing");
    }
}
