//! `birkhoff schema`: looks at files and writes a schema.

use super::args::SchemaArgs;
use super::output;
use crate::data::reader::{ReadOptions, Source};
use crate::data::survey::survey;
use crate::model::config::Config;
use crate::text::group;
use crate::train::run::write_atomic;
use crate::train::schema::format;

/// Runs the subcommand.
pub fn run(args: &SchemaArgs) -> anyhow::Result<()> {
    let cfg = Config::load(args.config.config.as_deref(), &args.config.sets)?;
    let (places, _spool) = super::data::places(&args.files)?;
    let source = Source::new(places, format(&cfg.data), ReadOptions::default());
    let bar = super::train::spinner(false, "looking at the columns");
    let found = survey(&source, args.rows, args.label.as_deref());
    bar.finish_and_clear();
    let found = found?;
    if args.json {
        return output::json(&found);
    }
    let names: Vec<String> = args.files.iter().map(|f| shell_word(&f.display().to_string())).collect();
    let text = found.to_toml(&names.join(" "));
    let Some(out) = &args.out else {
        // line by line would add nothing: the text ends with a line break already
        return output::line(text.trim_end());
    };
    let inputs: Vec<&std::path::Path> = args.files.iter().map(|f| f.as_path()).collect();
    output::not_an_input(out, &inputs)?;
    write_atomic(out, |w| std::io::Write::write_all(w, text.as_bytes()))?;
    let label = found.columns.iter().any(|c| c.kind == "label");
    let warnings: usize = found.columns.iter().map(|c| c.warnings.len()).sum();
    let header = match found.header_rule.is_empty() {
        true => String::new(),
        false => format!("; {}header: {}", if found.header { "" } else { "no " }, found.header_rule),
    };
    let skipped = match found.skipped {
        0 => String::new(),
        n => format!(", {} more could not be read", group(n)),
    };
    output::line(&format!(
        "{}: {} columns of {} rows{skipped} ({}{header}); {warnings} notes to read",
        out.display(),
        found.columns.len(),
        group(found.rows),
        found.format,
    ))?;
    let schema = shell_word(&out.display().to_string());
    output::line(&match label {
        true => format!(
            "next: birkhoff train --train {} --split 0.8,0.1,0.1 --schema {schema} --out runs/first",
            names.join(" ")
        ),
        false => format!(
            "no column looks like a label: make it again with --label NAME, or give one kind = \"label\" in {schema}"
        ),
    })
}

/// A word as a shell reads it: in quotes where it has to be.
fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:@%,".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.to_string(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}
