//! One ensemble layer (math.md section 3): modules side by side, joined, with shortcut and norm.

use super::config::{Ensemble, LayerPlan};
use super::modules::{module, slot_mix};
use super::params::{Builder, Init, Kind};
use crate::graph::Tensor;

/// The ensemble of a layer's modules: `X[B, m, d]` → `[B, l_out, d]` (eq. 2), with each module's
/// contribution (times its weight in a `weighted` ensemble).
pub fn ensemble(b: &mut Builder<'_>, plan: &LayerPlan, x: Tensor) -> (Tensor, Vec<Tensor>) {
    let mut parts: Vec<Tensor> =
        plan.modules.iter().map(|p| b.scoped(p.name.clone(), |b| module(b, &p.kind, x, p.slots))).collect();
    let k = parts.len();
    let y = match plan.ensemble {
        Ensemble::Concat => b.g.concat(&parts, 1),
        Ensemble::Sum => sum(b, &parts),
        Ensemble::Weighted => {
            let alpha = b.param("alpha", &[k], Init::Const(1.0 / k as f64), Kind::NoDecay);
            parts = parts
                .iter()
                .enumerate()
                .map(|(i, p)| {
                    let a = if k == 1 { alpha } else { b.g.slice(alpha, 0, i, 1) };
                    b.g.mul(*p, a)
                })
                .collect();
            sum(b, &parts)
        }
    };
    (y, parts)
}

fn sum(b: &mut Builder<'_>, parts: &[Tensor]) -> Tensor {
    parts[1..].iter().fold(parts[0], |s, p| b.g.add(s, *p))
}

/// A DHEN layer (eq. 1): `Y = LN(Ensemble(X) + Shortcut(X))`. The shortcut is X where the slot counts agree,
/// else a slot mix. Also returns the modules' contributions.
pub fn shortcut_layer(b: &mut Builder<'_>, plan: &LayerPlan, x: Tensor) -> (Tensor, Vec<Tensor>) {
    let (y, parts) = ensemble(b, plan, x);
    let s =
        if plan.shortcut_weight { b.scoped("shortcut", |b| slot_mix(b, "w", x, plan.slots_out)) } else { x };
    let y = b.g.add(y, s);
    (b.layer_norm("ln", y), parts)
}
