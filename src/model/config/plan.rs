//! From a configuration and the number of input slots to the shape of every layer.

use super::validate::MAX_SIZE;
use super::*;

/// Largest number of elements of one parameter tensor (4 GiB of f32).
const MAX_ELEMENTS: u128 = 1 << 30;

/// One layer with every number decided: X `[batch, slots_in, width]` → `[batch, slots_out, width]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerPlan {
    /// Position in the stack, from 0; names of parameters start with `layers.{index}.`.
    pub index: usize,
    /// Slots m of the input.
    pub slots_in: usize,
    /// Slots of the output, l_out.
    pub slots_out: usize,
    /// The modules, in the order of the configuration.
    pub modules: Vec<ModulePlan>,
    /// How their outputs are combined.
    pub ensemble: Ensemble,
    /// Whether the shortcut needs a slot mix W `[slots_in, slots_out]`: only where the counts differ.
    pub shortcut_weight: bool,
}

/// One module with every number decided: X `[batch, slots_in, width]` → U `[batch, slots, width]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModulePlan {
    /// Unique in its layer: the kind, then `attention_1`, `attention_2`, …
    pub name: String,
    /// Kind and options, nothing left at "0 = default".
    pub kind: ModuleKind,
    /// Output slots l.
    pub slots: usize,
}

/// The settings of one layer and the keys that they come from.
struct Layer<'a> {
    index: usize,
    modules: &'a [ModuleConfig],
    modules_key: String,
    ensemble: Ensemble,
    slots: usize,
    slots_key: String,
}

impl ModelConfig {
    /// The shape of every layer for `m` input slots (dense slots and categorical columns together).
    pub fn resolve(&self, m: usize) -> Result<Vec<LayerPlan>, ConfigError> {
        if m == 0 || m > MAX_SIZE {
            return Err(ConfigError::general(format!(
                "the data gives {m} slots; a model takes 1 to {MAX_SIZE}"
            )));
        }
        let mut plans = Vec::with_capacity(self.layers);
        let mut slots_in = m;
        for index in 0..self.layers {
            let layer = self.settings(index);
            let plan = self.plan_layer(&layer, slots_in)?;
            slots_in = plan.slots_out;
            plans.push(plan);
        }
        let first = self.head.hidden.first().copied().unwrap_or(1);
        check_elements("model.head.hidden", "the head", &[slots_in * self.width, first])?;
        for pair in self.head.hidden.windows(2) {
            check_elements("model.head.hidden", "the head", pair)?;
        }
        for pair in self.features.dense_hidden.windows(2) {
            check_elements("model.features.dense_hidden", "the numeric MLP", pair)?;
        }
        let dense = self.features.dense_hidden.last().copied().unwrap_or(1);
        let out = self.features.dense_slots * self.width;
        check_elements("model.features.dense_slots", "the numeric MLP", &[dense, out])?;
        Ok(plans)
    }

    /// The shape errors that no number of input slots can avoid.
    pub(super) fn check_known_shapes(&self) -> Result<(), ConfigError> {
        let mut slots_in = None;
        for index in 0..self.layers {
            slots_in = self.settings(index).output(slots_in)?.0;
        }
        Ok(())
    }

    fn settings(&self, index: usize) -> Layer<'_> {
        let own = self.layer.get(index);
        let path = format!("model.layer[{index}]");
        let own_modules = own.and_then(|l| l.modules.as_deref());
        let own_slots = own.and_then(|l| l.slots);
        Layer {
            index,
            modules: own_modules.unwrap_or(&self.modules),
            modules_key: if own_modules.is_some() {
                format!("{path}.modules")
            } else {
                "model.modules".into()
            },
            ensemble: own.and_then(|l| l.ensemble).unwrap_or(self.ensemble),
            slots: own_slots.unwrap_or(self.slots),
            slots_key: if own_slots.is_some() { format!("{path}.slots") } else { "model.slots".into() },
        }
    }

    fn plan_layer(&self, layer: &Layer<'_>, slots_in: usize) -> Result<LayerPlan, ConfigError> {
        let (out, each) = layer.output(Some(slots_in))?;
        let slots_out = out.unwrap_or(slots_in);
        let mut modules: Vec<ModulePlan> = Vec::with_capacity(layer.modules.len());
        for (i, module) in layer.modules.iter().enumerate() {
            let kind = self.concrete(&module.kind);
            let slots = each[i].unwrap_or(slots_in);
            let key = format!("{}[{i}]", layer.modules_key);
            check_module(&key, &kind, slots_in, self.width, slots)?;
            let before = modules.iter().filter(|p| p.kind.kind() == kind.kind()).count();
            let name = match before {
                0 => kind.kind().name().to_owned(),
                n => format!("{}_{n}", kind.kind()),
            };
            modules.push(ModulePlan { name, kind, slots });
        }
        Ok(LayerPlan {
            index: layer.index,
            slots_in,
            slots_out,
            modules,
            ensemble: layer.ensemble,
            shortcut_weight: slots_in != slots_out,
        })
    }

    fn concrete(&self, kind: &ModuleKind) -> ModuleKind {
        match kind {
            ModuleKind::Attention { heads, ffn: 0 } => {
                ModuleKind::Attention { heads: *heads, ffn: 2 * self.width }
            }
            other => other.clone(),
        }
    }
}

/// A slot count where it is known: the number of input slots may not be.
type Known = Option<usize>;

impl Layer<'_> {
    /// The output slots of the layer and of each module; `None` where they depend on an unknown
    /// number of input slots.
    fn output(&self, slots_in: Known) -> Result<(Known, Vec<Known>), ConfigError> {
        let result = match self.ensemble {
            Ensemble::Concat => self.concat(slots_in)?,
            Ensemble::Sum | Ensemble::Weighted => self.same(slots_in)?,
        };
        match result.0 {
            Some(out) if out > MAX_SIZE => Err(ConfigError::at(
                &self.slots_key,
                format!(
                    "layer {} would output {out} slots, more than {MAX_SIZE}; set {}",
                    self.index, self.slots_key
                ),
            )),
            _ => Ok(result),
        }
    }

    /// `sum`, `weighted`: one count for all.
    fn same(&self, slots_in: Known) -> Result<(Known, Vec<Known>), ConfigError> {
        let fixed = (self.slots > 0).then_some(self.slots);
        let own = |m: &ModuleConfig| (m.slots > 0).then_some(m.slots);
        // Without a count for the layer, modules that all give their own decide it.
        let all_own = self.modules.iter().all(|m| m.slots > 0);
        let first = self.modules.first().and_then(own);
        let out = fixed.or(if all_own { first } else { slots_in });
        for (i, module) in self.modules.iter().enumerate() {
            if let (Some(l), Some(out)) = (own(module), out)
                && l != out
            {
                let key = format!("{}[{i}].slots", self.modules_key);
                let others = match (fixed, all_own) {
                    (Some(_), _) => format!("{} = {out}", self.slots_key),
                    (None, true) => format!("{}[0].slots = {out}", self.modules_key),
                    (None, false) => format!("the {out} slots of layer {}'s input", self.index),
                };
                let message = format!(
                    "{key} = {l} differs from {others}, and ensemble = \"{}\" adds modules of equal slots; \
                     set {} = {l} and leave the modules' slots out, or use ensemble = \"concat\"",
                    self.ensemble, self.slots_key
                );
                return Err(ConfigError::at(&key, message));
            }
        }
        Ok((out, vec![out; self.modules.len()]))
    }

    /// `concat`: the modules without a count share what the others leave, the remainder to the first.
    fn concat(&self, slots_in: Known) -> Result<(Known, Vec<Known>), ConfigError> {
        let given: usize = self.modules.iter().map(|m| m.slots).sum();
        let sharing = self.modules.iter().filter(|m| m.slots == 0).count();
        let each_given = || self.modules.iter().map(|m| (m.slots > 0).then_some(m.slots)).collect();
        let total = match (self.slots, sharing) {
            (0, 0) => return Ok((Some(given), each_given())),
            (0, _) => slots_in,
            (l, _) => Some(l),
        };
        let Some(total) = total else { return Ok((None, each_given())) };
        let what = match self.slots {
            0 => format!("layer {} keeps its {total} input slots ({} = 0)", self.index, self.slots_key),
            _ => format!("{} = {total}", self.slots_key),
        };
        let fail = |message| Err(ConfigError::at(&self.slots_key, message));
        if sharing == 0 && given != total {
            return fail(format!(
                "{what} but the modules of layer {} output {given} slots together; use {given}",
                self.index
            ));
        }
        if total < given + sharing {
            return fail(format!(
                "{what}, too few for ensemble = \"concat\" of {} modules in layer {}; set {} to at least {}",
                self.modules.len(),
                self.index,
                self.slots_key,
                given + sharing
            ));
        }
        let left = total - given;
        let (share, mut extra) = match sharing {
            0 => (0, 0),
            n => (left / n, left % n),
        };
        let each = self.modules.iter().map(|m| match m.slots {
            0 => Some(share + std::mem::take(&mut extra)),
            l => Some(l),
        });
        Ok((Some(total), each.collect()))
    }
}

/// Refuses a parameter tensor that could not be held.
fn check_elements(key: &str, what: &str, shape: &[usize]) -> Result<(), ConfigError> {
    let elements = shape.iter().try_fold(1u128, |p, &s| p.checked_mul(s as u128));
    match elements {
        Some(n) if n <= MAX_ELEMENTS => Ok(()),
        _ => {
            let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
            let message = format!(
                "{key}: {what} would have a weight of {} elements, more than 2^30; \
                 make the width, the slots or the hidden widths smaller",
                sizes.join(" x ")
            );
            Err(ConfigError::at(key, message))
        }
    }
}

/// The largest weights of a module: m slots of width d in, l slots out.
fn check_module(key: &str, kind: &ModuleKind, m: usize, d: usize, l: usize) -> Result<(), ConfigError> {
    let what = format!("a {} module", kind.kind());
    let check = |shape: &[usize]| check_elements(key, &what, shape);
    let flat = m * d;
    match kind {
        ModuleKind::Linear | ModuleKind::Gram => check(&[m, l.max(d)]),
        ModuleKind::Attention { ffn, .. } => check(&[d, *ffn]).and_then(|()| check(&[m, l])),
        ModuleKind::Cross { form, rank, .. } => {
            if *form == CrossForm::Full && check(&[flat, flat]).is_err() {
                let message = format!(
                    "{key}: a full cross module would have weights of {flat} x {flat} elements, more than 2^30; \
                     use form = \"low-rank\" with a rank"
                );
                return Err(ConfigError::at(key, message));
            }
            check(&[flat, (*rank).max(1)])?;
            check(&[flat, l, d])
        }
        ModuleKind::Dlrm { compressed, hidden } => {
            let inputs = m.saturating_mul(m + 1) / 2 + compressed * d;
            check_mlp(&check, inputs, hidden)?;
            check(&[hidden.last().copied().unwrap_or(1), l, d])
        }
        ModuleKind::Conv { channels, .. } => check(&[m, *channels, l]),
        ModuleKind::Fm => check(&[l, d, d]),
        ModuleKind::Mlp { hidden } => {
            check_mlp(&check, flat, hidden)?;
            check(&[hidden.last().copied().unwrap_or(1), l, d])
        }
    }
}

fn check_mlp(
    check: &impl Fn(&[usize]) -> Result<(), ConfigError>,
    inputs: usize,
    hidden: &[usize],
) -> Result<(), ConfigError> {
    let mut width = inputs;
    for &h in hidden {
        check(&[width, h])?;
        width = h;
    }
    Ok(())
}
