//! What a run says of itself besides its results: `model.json` (layers, parameters, costs) and `profile.json`
//! (where a step's time goes).

use super::step::{TrainingStep, UPDATE};
use crate::diagnose::{ModelCard, PartCard, TimeReport, TimeRow};
use crate::graph::exec::NodeTime;
use crate::graph::{Role, fuse::fuse, plan};
use crate::model::config::{ModelConfig, ResidualMode};

/// Describes a training step by the scopes of its graph: parts are the first one or two words of a scope
/// (`numeric`, `layers.2`), their children the next (`attention`).
pub fn model_card(cfg: &ModelConfig, step: &TrainingStep, batch: usize) -> ModelCard {
    let (g, keep) = fuse(&step.graph, &[step.loss, step.norm2]);
    let order = plan::live_nodes(&g, &keep);
    let p = plan::plan(&g, &keep, &|_| vec![], &|op| op.may_alias());
    let res = &cfg.residual;
    let mut card = ModelCard {
        batch,
        width: cfg.width,
        mode: res.mode.name().into(),
        streams: if res.mode == ResidualMode::Shortcut { 1 } else { res.streams },
        parameters: step.params.iter().map(|p| p.shape().len()).sum(),
        memory_planned: p.peak(),
        memory_unshared: p.unshared,
        ..ModelCard::default()
    };
    for &n in &order {
        let node = &g.nodes()[n];
        let c = g.cost(node);
        card.flops_per_step += c.flops;
        card.bytes_per_step += c.read + c.written;
        let backward = node.role == Role::Backward;
        let output = if backward { None } else { node.outputs.first().map(|t| t.shape().to_string()) };
        visit(&mut card, &node.scope, |part| {
            if backward {
                part.flops_backward += c.flops
            } else {
                part.flops_forward += c.flops
            }
            if let Some(o) = &output {
                part.output.clone_from(o);
            }
        });
    }
    for p in &step.params {
        let scope = p.name.rsplit_once('.').map_or(p.name.as_str(), |(s, _)| s).to_string();
        visit(&mut card, &scope, |part| part.parameters += p.shape().len());
    }
    card
}

/// Shows `f` the part of a scope and its child, made where they are new.
fn visit(card: &mut ModelCard, scope: &str, mut f: impl FnMut(&mut PartCard)) {
    let words: Vec<&str> = scope.split('.').collect();
    let layer = words[0] == "layers" && words.len() > 1;
    let (head, rest) = words.split_at(if layer { 2 } else { 1 });
    let part = find(&mut card.parts, &head.join("."));
    f(part);
    if let (true, Some(child)) = (layer, rest.first()) {
        f(find(&mut part.children, child));
    }
}

fn find<'a>(parts: &'a mut Vec<PartCard>, name: &str) -> &'a mut PartCard {
    let i = parts.iter().position(|p| p.name == name).unwrap_or_else(|| {
        parts.push(PartCard { name: name.into(), ..PartCard::default() });
        parts.len() - 1
    });
    &mut parts[i]
}

/// Sums the times of a step's nodes by operation, stage and place.
pub fn time_report(
    device: String,
    clock: &str,
    step: u64,
    wall_micros: f64,
    times: &[NodeTime],
) -> TimeReport {
    let mut rows: Vec<TimeRow> = vec![];
    for t in times {
        let stage = stage(t);
        match rows.iter_mut().find(|r| r.op == t.op && r.stage == stage && r.scope == t.scope) {
            Some(r) => {
                r.calls += 1;
                r.micros += t.micros;
            }
            None => rows.push(TimeRow {
                op: t.op.clone(),
                stage: stage.into(),
                scope: t.scope.clone(),
                calls: 1,
                micros: t.micros,
            }),
        }
    }
    TimeReport { device, clock: clock.into(), step, wall_micros, rows }
}

/// The file knows three stages; what goes on between ranks counts where it was put in.
fn stage(t: &NodeTime) -> &'static str {
    match t.role {
        Role::Backward => "backward",
        Role::Update => "update",
        Role::Communication if t.scope == UPDATE => "update",
        Role::Forward | Role::Communication => "forward",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::build::{EmbeddingSpec, FeatureSpec, model};
    use crate::model::config::Config;
    use crate::train::step::training_step;

    #[test]
    fn a_card_accounts_for_every_parameter_and_flop() {
        let cfg = Config::load(None, &["train.batch=8".into(), "model.layers=3".into()]).unwrap();
        let columns = (1..=4).map(|c| (format!("C{c}"), 10)).collect();
        let f = FeatureSpec { numeric: 5, tables: vec![EmbeddingSpec { columns, ..Default::default() }] };
        let step = training_step(model(&cfg.model, &f, 8, true, 0.01, 0.0).unwrap(), &cfg.train);
        let card = model_card(&cfg.model, &step, 8);
        let names: Vec<&str> = card.parts.iter().map(|p| p.name.as_str()).collect();
        for part in ["numeric", "embeddings", "layers.0", "layers.2", "final_norm", "head", "update"] {
            assert!(names.contains(&part), "{part} in {names:?}");
        }
        let sum = |f: fn(&PartCard) -> f64| card.parts.iter().map(f).sum::<f64>();
        assert_eq!(sum(|p| p.parameters as f64) as usize, card.parameters);
        let flops = sum(|p| p.flops_forward + p.flops_backward);
        assert!((flops - card.flops_per_step).abs() < 1e-6 * flops && flops > 0.0);
        let layer = card.parts.iter().find(|p| p.name == "layers.1").unwrap();
        assert_eq!(layer.output, "[40, 4, 16]", "8 rows of 5 slots, 4 streams");
        let inside: Vec<&str> = layer.children.iter().map(|p| p.name.as_str()).collect();
        assert!(inside.contains(&"attention") && inside.contains(&"linear") && inside.contains(&"mhc"));
        let attention = layer.children.iter().find(|p| p.name == "attention").unwrap();
        assert!(attention.parameters > 0 && attention.flops_backward > attention.flops_forward);
    }

    #[test]
    fn times_are_summed_by_place_and_stage() {
        let t = |op: &str, scope: &str, role, micros| NodeTime {
            op: op.into(),
            scope: scope.into(),
            role,
            micros,
        };
        let times = [
            t("matmul", "head", Role::Forward, 1.0),
            t("matmul", "head", Role::Backward, 2.0),
            t("matmul", "head", Role::Forward, 3.0),
            t("adamw", "update", Role::Update, 4.0),
            t("all_reduce", "accumulate", Role::Communication, 5.0),
            t("all_reduce", "update", Role::Communication, 6.0),
        ];
        let r = time_report("cpu".into(), "host", 7, 11.0, &times);
        let rows: Vec<_> = r.rows.iter().map(|r| (r.stage.as_str(), r.calls, r.micros)).collect();
        let matmul = [("forward", 2, 4.0), ("backward", 1, 2.0)];
        assert_eq!(rows[..2], matmul);
        assert_eq!(rows[2..], [("update", 1, 4.0), ("forward", 1, 5.0), ("update", 1, 6.0)]);
    }
}
