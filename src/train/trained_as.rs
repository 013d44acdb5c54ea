//! Weights know what they were trained as: a run's `config.toml` that was changed since builds another model of them.

use super::checkpoint::CheckpointMeta;
use super::resume::{Change, STATE, Saved, differences};
use crate::model::config::Config;
use anyhow::bail;
use std::path::Path;

/// The key of the configuration in the metadata of `weights.safetensors`.
pub(crate) const CONFIG: &str = "config";

/// Keys of `[data]` that say how a file is read, of which each has its own; and one that the fitted vocabularies decide,
/// since older runs have another default.
const OF_FILES: [&str; 10] = [
    "data.format",
    "data.delimiter",
    "data.quote",
    "data.header",
    "data.comment",
    "data.na",
    "data.encoding",
    "data.trim",
    "data.shuffle_rows",
    "data.standardize_log",
];

/// An error that names the first key of `[model]` or `[data]` in which a run's configuration is not that which its weights
/// were trained with. `name` is the configuration's file. Weights of a version that did not keep it pass.
pub fn check(name: &Path, config: &Config, meta: &CheckpointMeta) -> anyhow::Result<()> {
    let saved = || Some(serde_json::from_str::<Saved>(meta.extra.get(STATE)?).ok()?.config);
    let Some(text) = meta.extra.get(CONFIG).cloned().or_else(saved) else { return Ok(()) };
    // what this version does not know, it does not compare
    let Ok(then) = Config::from_text(CONFIG, &text, &[]) else { return Ok(()) };
    let counts = |key: &str| {
        let of_files =
            OF_FILES.iter().any(|k| key.strip_prefix(k).is_some_and(|r| r.is_empty() || r.starts_with('[')));
        key.starts_with("model.") || key.starts_with("data.") && !of_files
    };
    if let Some(Change { key, was, is }) = differences(&then, config)?.into_iter().find(|c| counts(&c.key)) {
        bail!(
            "{}: {key} = {is}, but the run's weights were trained with {key} = {was}; undo the change, or train a run \
             that has it",
            name.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_key_that_differs_is_named_and_reading_is_free() {
        let was = "[model]\nwidth = 16\n[data]\nmin_count = 3\nna = ['x']";
        let config = |text: &str| Config::from_text("c", text, &[]).unwrap();
        let mut meta = CheckpointMeta::default();
        let name = Path::new("r/config.toml");
        let other = config("[model]\nwidth = 8");
        assert!(check(name, &other, &meta).is_ok(), "weights of an older version");
        meta.extra.insert(CONFIG.into(), config(was).to_toml().unwrap());
        assert!(check(name, &config(was), &meta).is_ok());
        let free =
            "[model]\nwidth = 16\n[data]\nmin_count = 3\nna = ['-', 'y']\nheader = 'yes'\n[train]\nlr = 1.0";
        assert!(check(name, &config(free), &meta).is_ok());
        let e = check(name, &other, &meta).unwrap_err().to_string();
        assert!(
            e.starts_with("r/config.toml: model.width = 8, ") && e.contains("with model.width = 16;"),
            "{e}"
        );
        let e = check(name, &config("[model]\nwidth = 16"), &meta).unwrap_err().to_string();
        assert!(e.contains("data.min_count = 3"), "{e}");
    }
}
