//! Evaluations of a run: when weights are the best so far, and when patience has run out.

use super::events::{Event, Interrupted, Report};
use super::infer::NoScore;
use super::progress::Best;
use super::store::Store;
use super::trainer::Trainer;
use crate::data::feed::Feed;
use crate::model::config;
use anyhow::bail;
use web_time::Instant;

impl Trainer {
    /// The evaluation at the end of an epoch, or of a run in its middle; true if patience has run out.
    pub(super) async fn finish_epoch(
        &mut self,
        valid: &Feed,
        store: &mut dyn Store,
        report: &mut dyn Report,
    ) -> anyhow::Result<bool> {
        let whole = !self.stopping;
        let better = match self.measure(valid, store, report).await {
            Err(e) if e.is::<Interrupted>() => {
                self.checkpoint(store).await?;
                return Err(Interrupted { step: self.progress.step }.into());
            }
            other => other?,
        };
        if whole {
            self.progress.epoch += 1;
            self.progress.batch = 0;
        }
        // patience that runs out with the last epoch changes nothing
        let out = self.out_of_patience() && self.progress.epoch < self.cfg.train.epochs;
        self.progress.stopped_early = out;
        self.keep(better, store).await?;
        Ok(out)
    }

    /// An evaluation in the middle of an epoch; true if patience has run out.
    pub(super) async fn evaluate(
        &mut self,
        valid: &Feed,
        store: &mut dyn Store,
        report: &mut dyn Report,
    ) -> anyhow::Result<bool> {
        let better = match self.measure(valid, store, report).await {
            Err(e) if e.is::<Interrupted>() => {
                self.checkpoint(store).await?;
                return Err(Interrupted { step: self.progress.step }.into());
            }
            other => other?,
        };
        self.progress.evaluate = false;
        let out = self.out_of_patience();
        self.progress.stopped_early = out;
        self.keep(better, store).await?;
        Ok(out)
    }

    fn out_of_patience(&self) -> bool {
        let patience = self.cfg.train.patience;
        patience > 0 && self.progress.bad_evals >= patience
    }

    /// A checkpoint after an evaluation, then the weights if they are the best: should the process end between the two,
    /// the weights can be made from the checkpoint.
    async fn keep(&mut self, better: bool, store: &mut dyn Store) -> anyhow::Result<()> {
        self.checkpoint(store).await?;
        if better {
            self.progress.window.pause();
            let begin = Instant::now();
            self.save_best(store).await?;
            self.progress.times.checkpoints += begin.elapsed().as_secs_f64();
            self.progress.window.resume();
        }
        Ok(())
    }

    /// Evaluates; whether these weights are the best so far.
    async fn measure(
        &mut self,
        valid: &Feed,
        store: &mut dyn Store,
        report: &mut dyn Report,
    ) -> anyhow::Result<bool> {
        self.progress.window.pause();
        let mut loader = self.valid_batches(valid)?;
        let begin = Instant::now();
        let detail = match self.scorer.evaluate(&mut self.state, &mut loader, |_| (), report).await {
            Err(e) if e.is::<NoScore>() => {
                self.check_state().await?;
                bail!(
                    "the validation loss is not finite after step {}, though all weights are: {e}; lower train.lr",
                    self.progress.step
                );
            }
            other => other?,
        };
        self.progress.times.evaluation += begin.elapsed().as_secs_f64();
        let metrics = detail.metrics.clone();
        let step = self.progress.step;
        // of one class only NE and AUC are undefined: the log loss decides
        let score = match self.cfg.train.monitor {
            config::Monitor::Ne => metrics.ne.unwrap_or(metrics.logloss),
            config::Monitor::Auc => metrics.auc.map_or(metrics.logloss, |a| -a),
            config::Monitor::Logloss => metrics.logloss,
        };
        if !score.is_finite() {
            self.check_state().await?;
            bail!(
                "the validation loss is not finite after step {step}, though all weights are; lower train.lr"
            );
        }
        let p = &mut self.progress;
        let best = p.best.as_ref().is_none_or(|b| score < b.score);
        if best {
            p.best = Some(Best { score, step, detail });
            (p.bad_evals, p.flat) = (0, 0);
        } else {
            p.bad_evals += 1;
            p.flat += 1;
            if p.flat >= self.cfg.train.plateau_patience {
                (p.flat, p.cuts) = (0, p.cuts + 1);
            }
        }
        let epoch = p.epoch + 1;
        let e = Event::Eval { step, epoch, metrics, best, seconds: self.elapsed() };
        store.log(&e)?;
        report.event(&e)?;
        self.progress.window.resume();
        Ok(best)
    }
}
