//! What ranks are called with: at first as the user says, after a failure so that training goes on.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, bail, ensure};
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches};

use super::super::args::{Cli, Command};
use super::group::Work;
use crate::collective::connect::Kind;
use crate::train::run::{CONFIG, DATA, SUMMARY, VOCAB, checkpoints};

/// Options of `birkhoff train` whose values the run folder holds: `--resume` refuses some of them and needs none.
const RECORDED: [&str; 15] = [
    "train",
    "valid",
    "split",
    "split_by",
    "format",
    "schema",
    "cache",
    "on_bad_row",
    "out",
    "resume",
    "config",
    "sets",
    "epochs",
    "seed",
    "force",
];

/// A command line of `birkhoff`, checked.
#[derive(Debug)]
pub struct Checked {
    argv: Vec<OsString>,
    training: Option<Training>,
}

#[derive(Debug)]
struct Training {
    run: PathBuf,
    /// `--resume` with the options that the run folder does not hold.
    again: Vec<OsString>,
    /// It goes on with an earlier run anyway.
    resumes: bool,
    force: bool,
    /// What stood in the folder before: a run that is there already is not the one that is launched.
    config_before: Option<SystemTime>,
    summary_before: Option<SystemTime>,
}

impl Checked {
    /// Checks what stands after `--`, so that a mistake is told once and not by every rank. `joins`: the run may have
    /// begun already, on another host.
    ///
    /// # Errors
    /// No command or another one than train, eval and predict, an option of it that is wrong, standard input as data.
    pub fn new(argv: &[String], joins: bool) -> anyhow::Result<Self> {
        let given = std::iter::once("birkhoff").chain(argv.iter().map(String::as_str));
        ensure!(
            !argv.is_empty(),
            "no command after --; for example: birkhoff launch --nproc 4 -- train --train train.tsv --valid valid.tsv --out runs/a"
        );
        let known = ["train", "eval", "predict"];
        ensure!(
            known.contains(&argv[0].as_str()),
            "`{}` is not a command that ranks run together; after -- comes train",
            argv[0]
        );
        let matches = match Cli::command().try_get_matches_from(given.clone()) {
            Ok(m) => m,
            Err(e) if !e.use_stderr() => {
                bail!("ask for help without launch: birkhoff {} --help", argv[0])
            }
            Err(e) => {
                let line = super::super::usage_line(&e.to_string());
                bail!("{}: {}; see birkhoff {0} --help", argv[0], line.trim_start_matches("error: "))
            }
        };
        let cli = Cli::from_arg_matches(&matches).map_err(|e| anyhow::anyhow!("{e}"))?;
        let (files, training): (Vec<&PathBuf>, _) = match &cli.command {
            Command::Train(args) => {
                ensure!(
                    args.ranks.ranks.is_none() && args.ranks.collective != Kind::Local,
                    "--ranks and --collective local are for threads of one process: birkhoff train --ranks N without launch"
                );
                crate::cli::ranks::no_dashboard(args)?;
                if args.resume.is_none() {
                    args.resolve_config()?;
                }
                let run = args.folder().to_owned();
                let training = Training {
                    again: again(&run, matches.subcommand_matches("train").context("no options")?)?,
                    resumes: args.resume.is_some(),
                    force: args.force,
                    config_before: if joins { None } else { written(&run.join(CONFIG)) },
                    summary_before: written(&run.join(SUMMARY)),
                    run,
                };
                (
                    args.data
                        .train
                        .iter()
                        .chain(&args.data.valid)
                        .chain(&args.config.config)
                        .chain(&args.data.schema)
                        .collect(),
                    Some(training),
                )
            }
            Command::Eval(args) => (args.data.iter().collect(), None),
            Command::Predict(args) => (args.data.iter().collect(), None),
            _ => bail!("`{}` is not a command that ranks run together", argv[0]),
        };
        if let Some(pipe) = files.iter().find(|f| crate::data::input::is_pipe(f)) {
            let name =
                if pipe.as_os_str() == "-" { "standard input".into() } else { pipe.display().to_string() };
            bail!(
                "{}: several ranks cannot read {name}, a pipe that can be read once only; write it to a file",
                argv[0]
            );
        }
        Ok(Checked { argv: argv.iter().map(OsString::from).collect(), training })
    }
}

/// `train --resume RUN` and the options that were given beside those on record.
fn again(run: &Path, given: &ArgMatches) -> anyhow::Result<Vec<OsString>> {
    let mut argv: Vec<OsString> = vec!["train".into(), "--resume".into(), run.into()];
    let cli = Cli::command();
    let train = cli.find_subcommand("train").context("no command train")?;
    for arg in train.get_arguments() {
        let id = arg.get_id().as_str();
        // help and version are not among what was given
        let known = given.try_contains_id(id).unwrap_or(false);
        if !known || RECORDED.contains(&id) || given.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        let Some(long) = arg.get_long() else { continue };
        match arg.get_action().takes_values() {
            false => argv.push(format!("--{long}").into()),
            true => {
                for value in given.get_raw(id).into_iter().flatten() {
                    let mut option = OsString::from(format!("--{long}="));
                    option.push(value);
                    argv.push(option);
                }
            }
        }
    }
    Ok(argv)
}

fn written(file: &Path) -> Option<SystemTime> {
    std::fs::metadata(file).and_then(|m| m.modified()).ok()
}

impl Training {
    /// Whether the folder holds what this launch has begun, and not an earlier run that it never came to replace.
    fn began(&self) -> bool {
        let now = written(&self.run.join(CONFIG));
        now.is_some() && (self.resumes || now != self.config_before)
    }

    /// Whether `--resume` can take it up: from a checkpoint, or before the first one from its beginning.
    fn can_go_on(&self) -> bool {
        let described = || [VOCAB, DATA].iter().all(|f| self.run.join(f).exists());
        self.began() && (!checkpoints(&self.run).is_empty() || described())
    }
}

impl Work for Checked {
    fn arguments(&mut self, attempt: u32) -> Vec<OsString> {
        let mut argv = self.argv.clone();
        match &self.training {
            Some(t) if attempt > 0 && !t.resumes => {
                if t.can_go_on() {
                    return t.again.clone();
                }
                // what this launch left half made is not to be asked about
                if t.began() && !t.force {
                    argv.push("--force".into());
                }
                argv
            }
            _ => argv,
        }
    }

    fn saved(&self) -> Option<u64> {
        let t = self.training.as_ref().filter(|t| t.began())?;
        checkpoints(&t.run).last().map(|(step, _)| *step)
    }

    fn saves(&self) -> bool {
        self.training.is_some()
    }

    fn finished(&self) -> bool {
        self.training.as_ref().is_some_and(|t| {
            let now = written(&t.run.join(SUMMARY));
            now.is_some() && now != t.summary_before
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    fn joined(argv: &[OsString]) -> String {
        argv.iter().map(|a| a.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_restart_takes_up_what_was_begun_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("r");
        let r = run.display();
        let first = format!(
            "train --train a b --valid v --out {r} --set model.layers=2 --set train.lr=1e-3 --epochs 3 --seed 4 --json \
             --device=cpu -q --cache"
        );
        let go_on = format!("train --resume {r} --device=cpu --json --quiet");
        let mut w = Checked::new(&words(&first), false).unwrap();
        assert_eq!(joined(&w.arguments(0)), first);
        // nothing there yet
        assert_eq!((joined(&w.arguments(1)), w.saved()), (first.clone(), None));
        // half made
        fs::create_dir_all(run.join("checkpoints")).unwrap();
        fs::write(run.join(CONFIG), "# birkhoff run\n").unwrap();
        assert_eq!(joined(&w.arguments(1)), format!("{first} --force"));
        // before the first checkpoint
        fs::write(run.join(VOCAB), "").unwrap();
        fs::write(run.join(DATA), "").unwrap();
        assert_eq!((joined(&w.arguments(1)), w.saved()), (go_on.clone(), None));
        fs::write(run.join("checkpoints/step-000000040.safetensors"), "").unwrap();
        assert_eq!((joined(&w.arguments(2)), w.saved()), (go_on.clone(), Some(40)));
        assert_eq!(joined(&w.arguments(0)), first, "attempt 0 is what the user says");
        assert!(!w.finished());
        fs::write(run.join(SUMMARY), "").unwrap();
        assert!(w.finished());

        // the same folder, found there: it is not taken for the run that is launched
        let mut w = Checked::new(&words(&first), false).unwrap();
        assert_eq!((joined(&w.arguments(1)), w.saved(), w.finished()), (first.clone(), None, false));
        // unless this host comes to one that runs already
        let mut w = Checked::new(&words(&first), true).unwrap();
        assert_eq!((joined(&w.arguments(1)), w.saved()), (go_on, Some(40)));
        // what resumes at first resumes in the same words
        fs::remove_file(run.join(SUMMARY)).unwrap();
        let resume = format!("train --resume {r} --epochs 5");
        let mut w = Checked::new(&words(&resume), false).unwrap();
        assert_eq!((joined(&w.arguments(1)), w.saved()), (resume, Some(40)));
    }

    #[test]
    fn mistakes_are_told_before_any_rank_starts() {
        let fails = |text: &str, part: &str| {
            let e = Checked::new(&words(text), false).unwrap_err();
            let line = format!("{e:#}");
            assert!(line.contains(part) && !line.contains('\n'), "{text}: {line}");
        };
        assert!(Checked::new(&[], false).unwrap_err().to_string().starts_with("no command after --"));
        fails("schema a.csv", "`schema` is not a command that ranks run together");
        fails("launch --nproc 2 -- train", "`launch` is not");
        fails("train --trian a --valid b --out c", "--trian");
        fails("train --train - --valid b --out c", "standard input");
        fails("eval r --data -", "standard input");
        fails("train --train a --valid b --out c --set model.widht=8", "model.width");
        fails("train --help", "birkhoff train --help");
    }

    #[test]
    fn every_recorded_option_exists() {
        let cli = Cli::command();
        let train = cli.find_subcommand("train").unwrap();
        for id in RECORDED {
            assert!(train.get_arguments().any(|a| a.get_id() == id), "{id}");
        }
    }
}
