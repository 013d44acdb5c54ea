//! Which rank this process is, from the variables that launchers set.
//!
//! | started by | rank | world | rank 0's host |
//! |---|---|---|---|
//! | `birkhoff launch`, torchrun | `RANK` | `WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` |
//! | a Kubernetes indexed Job | `JOB_COMPLETION_INDEX` | `WORLD_SIZE` | `MASTER_ADDR` |
//! | Open MPI's mpirun | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `MASTER_ADDR`, unless all run on one host |
//! | MPICH's and Intel's mpirun | `PMI_RANK` | `PMI_SIZE` | the same |
//! | Slurm's srun | `SLURM_PROCID` | `SLURM_NTASKS` | the first of `SLURM_JOB_NODELIST` |
//!
//! The first row whose rank is set counts: mpirun within a Slurm job leaves Slurm's own variables in place, the same for
//! every process. `MASTER_ADDR` and `MASTER_PORT` come before what is worked out. Outside of all these: one rank alone.

use super::error::{CollectiveError, Result};
use xxhash_rust::xxh3::xxh3_64;

/// Where torch's launchers listen, too.
const PORT: u16 = 29_500;
/// Ports made from a job's name: below those that systems hand out by themselves.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// This process among all of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its number, from 0.
    pub rank: usize,
    /// Processes in all.
    pub world: usize,
    /// Its number among those of its host, for choosing a device.
    pub local_rank: usize,
    /// Processes on its host; 1 where the launcher does not tell.
    pub local_world: usize,
    /// Whether some ranks are known to be on other hosts.
    pub several_hosts: bool,
    /// A name or address of rank 0's host; empty where the launcher does not tell and they may be on several hosts.
    pub master: String,
    /// The port at which rank 0 listens.
    pub port: u16,
    /// A name for the job and its attempt: `BIRKHOFF_JOB`, else the launcher's.
    pub job: String,
    /// Who started it: `torchrun or birkhoff launch`, `Kubernetes`, `mpirun` or `srun`.
    pub source: &'static str,
}

type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

fn wrong(name: &str, value: &str, expected: &str) -> CollectiveError {
    CollectiveError::Setup(format!("{name} is {value:?}; expected {expected}"))
}

fn missing(name: &str, because: &str, expected: &str) -> CollectiveError {
    CollectiveError::Setup(format!("{because}, but {name} is not set; expected {expected}"))
}

/// A number; `None` where the variable is unset or empty.
fn number(get: Lookup, name: &str) -> Result<Option<usize>> {
    match get(name).map(|v| v.trim().to_string()) {
        None => Ok(None),
        Some(v) if v.is_empty() => Ok(None),
        Some(v) => match v.parse::<u32>() {
            Ok(n) => Ok(Some(n as usize)),
            Err(_) => Err(wrong(name, &v, "a whole number")),
        },
    }
}

fn text(get: Lookup, name: &str) -> Option<String> {
    get(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty())
}

/// A launcher's own names for things.
struct Family {
    source: &'static str,
    rank: &'static str,
    world: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_world: &'static [&'static str],
}

const FAMILIES: [Family; 5] = [
    Family {
        source: "torchrun or birkhoff launch",
        rank: "RANK",
        world: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_world: &["LOCAL_WORLD_SIZE"],
    },
    // a pod is a host of its own
    Family {
        source: "Kubernetes",
        rank: "JOB_COMPLETION_INDEX",
        world: &["WORLD_SIZE"],
        local_rank: &[],
        local_world: &[],
    },
    Family {
        source: "mpirun",
        rank: "OMPI_COMM_WORLD_RANK",
        world: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_world: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    },
    Family {
        source: "mpirun",
        rank: "PMI_RANK",
        world: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "SLURM_LOCALID"],
        local_world: &["MPI_LOCALNRANKS"],
    },
    Family {
        source: "srun",
        rank: "SLURM_PROCID",
        // of the step where it is smaller than the job
        world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"],
        local_rank: &["SLURM_LOCALID"],
        local_world: &[],
    },
];

impl Place {
    /// What this process's environment says.
    ///
    /// # Errors
    /// See [`Place::from_env`].
    pub fn of_this_process() -> Result<Option<Place>> {
        Self::from_env(&|name| std::env::var(name).ok())
    }

    /// What variables say, read by `get`; `None` where no launcher has set any: one rank alone.
    ///
    /// # Errors
    /// If a variable is missing beside others, is no number, or contradicts another.
    pub fn from_env(get: Lookup) -> Result<Option<Place>> {
        for family in &FAMILIES {
            let Some(rank) = number(get, family.rank)? else { continue };
            let kubernetes = family.source == "Kubernetes";
            if kubernetes && text(get, "WORLD_SIZE").is_none() {
                // every indexed Job sets its index, also those whose pods have nothing to do with one another
                continue;
            }
            return Self::of(family, rank, get).map(Some);
        }
        if let Some(world) = text(get, "WORLD_SIZE") {
            return Err(missing(
                "RANK",
                &format!("WORLD_SIZE is {world:?}"),
                "this process's number, from 0 (or a launcher that sets its own variables)",
            ));
        }
        Ok(None)
    }

    fn of(family: &Family, rank: usize, get: Lookup) -> Result<Place> {
        let first = |names: &[&'static str]| -> Result<Option<(&'static str, usize)>> {
            for &name in names {
                if let Some(n) = number(get, name)? {
                    return Ok(Some((name, n)));
                }
            }
            Ok(None)
        };
        let set = format!("{} is \"{rank}\"", family.rank);
        let Some((world_name, world)) = first(family.world)? else {
            return Err(missing(family.world[0], &set, "the number of processes"));
        };
        if world == 0 {
            return Err(wrong(world_name, "0", "at least 1"));
        }
        if rank >= world {
            let expected = format!("less than {world_name}, which is {world}");
            return Err(wrong(family.rank, &rank.to_string(), &expected));
        }
        if world_name != "WORLD_SIZE"
            && let Some(other) = number(get, "WORLD_SIZE")?
            && other != world
        {
            let expected = format!("{world} as {world_name} says, or nothing");
            return Err(wrong("WORLD_SIZE", &other.to_string(), &expected));
        }
        let local_rank = first(family.local_rank)?;
        let mut local_world = first(family.local_world)?;
        if local_world.is_none() && family.rank.starts_with("SLURM") {
            local_world = tasks_here(get)?;
        }
        if let (Some((name, local)), Some((all, n))) = (local_rank, local_world)
            && local >= n
        {
            return Err(wrong(name, &local.to_string(), &format!("less than {all}, which is {n}")));
        }
        let local_world_known = local_world.map(|l| l.1);
        let mut place = Place {
            rank,
            world,
            local_rank: local_rank.map_or(0, |l| l.1),
            local_world: local_world_known.unwrap_or(1),
            // a pod is a host of its own
            several_hosts: world
                > local_world_known.unwrap_or(if family.source == "Kubernetes" { 1 } else { world }),
            master: String::new(),
            port: PORT,
            job: String::new(),
            source: family.source,
        };
        place.job = place.name(get);
        place.master = place.master(get, &set, local_world_known)?;
        place.port = place.port(get)?;
        Ok(place)
    }

    /// Also in a restarted job's name is the attempt, so that what is left of the last one is told apart.
    fn name(&self, get: Lookup) -> String {
        let attempt = |job: String, name: &str| match text(get, name) {
            Some(n) => format!("{job}.{n}"),
            None => job,
        };
        if let Some(job) = text(get, "BIRKHOFF_JOB") {
            return attempt(job, "BIRKHOFF_RESTART");
        }
        if let Some(job) = text(get, "TORCHELASTIC_RUN_ID") {
            return attempt(format!("torchrun-{job}"), "TORCHELASTIC_RESTART_COUNT");
        }
        let own = match self.source {
            "mpirun" => ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"]
                .iter()
                .find_map(|n| text(get, n))
                .map(|j| format!("mpirun-{j}")),
            "srun" => text(get, "SLURM_JOB_ID")
                .map(|j| attempt(attempt(format!("slurm-{j}"), "SLURM_STEP_ID"), "SLURM_RESTART_COUNT")),
            _ => None,
        };
        own.unwrap_or_else(|| "birkhoff".into())
    }

    fn master(&self, get: Lookup, set: &str, local_world: Option<usize>) -> Result<String> {
        if let Some(master) = text(get, "MASTER_ADDR") {
            return Ok(master);
        }
        if self.world == 1 || local_world == Some(self.world) {
            return Ok("127.0.0.1".into());
        }
        for name in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"] {
            if let Some(list) = text(get, name) {
                return first_host(&list).ok_or_else(|| {
                    wrong(name, &list, "a list of hosts such as node[003-007,9] or a1,b[2-4]")
                });
            }
        }
        match self.source {
            // MPI finds its own way; only tcp needs it, and says so
            "mpirun" => Ok(String::new()),
            _ => Err(missing(
                "MASTER_ADDR",
                set,
                "a name or address of rank 0's host (127.0.0.1 for this one)",
            )),
        }
    }

    fn port(&self, get: Lookup) -> Result<u16> {
        let agent = text(get, "TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.eq_ignore_ascii_case("true"));
        match text(get, "MASTER_PORT") {
            Some(v) => {
                let port = v.parse::<u16>().ok().filter(|p| *p > 0);
                let port = port.ok_or_else(|| wrong("MASTER_PORT", &v, "a port from 1 to 65535"))?;
                // torchrun's agent listens at that port itself
                match agent && self.source.starts_with("torchrun") {
                    true => port.checked_add(1).ok_or_else(|| {
                        wrong(
                            "MASTER_PORT",
                            &v,
                            "at most 65534: torchrun's agent uses it, and the ranks the next one",
                        )
                    }),
                    false => Ok(port),
                }
            }
            // several jobs may share a host
            None if matches!(self.source, "mpirun" | "srun") && self.job != "birkhoff" => {
                let n = u64::from(PORTS.end - PORTS.start);
                Ok(PORTS.start + (xxh3_64(self.job.as_bytes()) % n) as u16)
            }
            None => Ok(PORT),
        }
    }
}

/// Slurm's tasks on this node: `SLURM_STEP_TASKS_PER_NODE` is like `2(x3),1`, by the node's place in the list.
fn tasks_here(get: Lookup) -> Result<Option<(&'static str, usize)>> {
    let Some(node) = number(get, "SLURM_NODEID")? else { return Ok(None) };
    for name in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
        let Some(list) = text(get, name) else { continue };
        let bad = || wrong(name, &list, "numbers of tasks such as 2(x3),1");
        let mut at = 0usize;
        for part in list.split(',') {
            let (tasks, nodes) = match part.split_once("(x") {
                Some((n, x)) => (n, x.strip_suffix(')').and_then(|x| x.parse().ok())),
                None => (part, Some(1)),
            };
            let (tasks, nodes): (usize, usize) = (tasks.parse().map_err(|_| bad())?, nodes.ok_or_else(bad)?);
            if (at..at.saturating_add(nodes)).contains(&node) {
                return Ok(Some((name, tasks)));
            }
            at = at.saturating_add(nodes);
        }
    }
    Ok(None)
}

/// The first host of a list in Slurm's form: `a1,b2`, `node[003-007,9]`, `r[1-2]n[05,07]`; `None` where it is none.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        if !rest[end..].starts_with('[') {
            break;
        }
        let (inside, after) = rest[end + 1..].split_once(']')?;
        let number = inside.split([',', '-']).next()?;
        if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        host.push_str(number);
        rest = after;
    }
    let fits = |c: char| c.is_alphanumeric() || matches!(c, '-' | '.' | '_' | ':');
    (!host.is_empty() && host.chars().all(fits)).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(set: &[(&str, &str)]) -> Result<Option<Place>> {
        Place::from_env(&|name| set.iter().find(|s| s.0 == name).map(|s| s.1.to_string()))
    }

    fn place(set: &[(&str, &str)]) -> Place {
        from(set).expect("variables that fit").expect("launched")
    }

    fn refused(set: &[(&str, &str)]) -> String {
        from(set).expect_err("variables that do not fit").to_string()
    }

    #[test]
    fn nobody_launched_it() {
        assert_eq!(from(&[]).unwrap(), None);
        // within salloc, and in an indexed Job whose pods are on their own
        assert_eq!(from(&[("SLURM_NTASKS", "4"), ("SLURM_JOB_NODELIST", "n1")]).unwrap(), None);
        assert_eq!(from(&[("JOB_COMPLETION_INDEX", "3")]).unwrap(), None);
        assert_eq!(from(&[("RANK", ""), ("MASTER_ADDR", "a")]).unwrap(), None);
    }

    const TORCHRUN: [(&str, &str); 6] = [
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("MASTER_ADDR", "10.0.0.7"),
        ("MASTER_PORT", "29400"),
    ];

    #[test]
    fn torchrun() {
        let p = place(&TORCHRUN);
        let expected = Place {
            rank: 5,
            world: 8,
            local_rank: 1,
            local_world: 4,
            several_hosts: true,
            master: "10.0.0.7".into(),
            port: 29_400,
            job: "birkhoff".into(),
            source: "torchrun or birkhoff launch",
        };
        assert_eq!(p, expected);
        // its agent listens at MASTER_PORT itself
        let mut set = TORCHRUN.to_vec();
        set.extend([
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RUN_ID", "x"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
        ]);
        let p = place(&set);
        assert_eq!((p.port, &p.job[..]), (29_401, "torchrun-x.2"));
        set[5].1 = "65535";
        assert!(refused(&set).contains("at most 65534"));
    }

    #[test]
    fn the_own_launcher() {
        let mut set = TORCHRUN.to_vec();
        set.extend([("BIRKHOFF_JOB", "j7"), ("BIRKHOFF_RESTART", "1")]);
        assert_eq!(place(&set).job, "j7.1");
        // the fewest variables for one host
        let p = place(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")]);
        assert_eq!((p.port, p.local_rank, &p.master[..]), (29_500, 0, "localhost"));
    }

    #[test]
    fn kubernetes() {
        let p =
            place(&[("JOB_COMPLETION_INDEX", "2"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "train-0.train")]);
        assert_eq!((p.rank, p.world, p.local_rank, p.local_world), (2, 4, 0, 1));
        assert_eq!((&p.master[..], p.port, p.source), ("train-0.train", 29_500, "Kubernetes"));
    }

    #[test]
    fn open_mpi_within_a_slurm_job() {
        let mut set = vec![
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_NAMESPACE", "2134376449"),
            // of the batch script, the same for all
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_JOB_NODELIST", "gpu[07-08]"),
        ];
        let p = place(&set);
        assert_eq!((p.rank, p.world, p.local_rank, p.local_world, p.source), (3, 4, 1, 2, "mpirun"));
        assert!(p.several_hosts);
        assert_eq!((&p.master[..], &p.job[..]), ("gpu07", "mpirun-2134376449"));
        assert!(PORTS.contains(&p.port));
        // who is rank 0's host is unknown without Slurm, unless there is one host only
        set.truncate(5);
        assert_eq!(place(&set).master, "");
        set[3].1 = "4";
        assert_eq!(place(&set).master, "127.0.0.1");
        let other = place(&[&set[..4], &[("PMIX_NAMESPACE", "2134376450")]].concat());
        assert_ne!(other.port, place(&set).port, "two jobs on one host");
    }

    #[test]
    fn mpich() {
        let set = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
        let p = place(&set);
        assert_eq!((p.rank, p.world, p.local_rank, p.local_world), (1, 2, 1, 2));
        assert_eq!((&p.master[..], p.port, p.source), ("127.0.0.1", 29_500, "mpirun"));
    }

    #[test]
    fn slurm() {
        let mut set = vec![
            ("SLURM_PROCID", "6"),
            ("SLURM_NTASKS", "7"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NODEID", "3"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"),
            ("SLURM_JOB_NODELIST", "node[003-005,9]"),
            ("SLURM_JOB_ID", "4711"),
            ("SLURM_STEP_ID", "0"),
        ];
        let p = place(&set);
        assert_eq!((p.rank, p.world, p.local_rank, p.local_world), (6, 7, 0, 1));
        assert_eq!((&p.master[..], &p.job[..], p.source), ("node003", "slurm-4711.0", "srun"));
        assert!(PORTS.contains(&p.port));
        set.extend([("MASTER_ADDR", "10.1.1.1"), ("MASTER_PORT", "4000")]);
        let p = place(&set);
        assert_eq!((&p.master[..], p.port), ("10.1.1.1", 4000));
        set[3].1 = "1";
        set[2].1 = "1";
        assert_eq!(place(&set).local_world, 2);
        set[4].1 = "2(x";
        assert!(refused(&set).contains(r#"SLURM_STEP_TASKS_PER_NODE is "2(x""#));
        // a step of fewer tasks than the job
        let p = place(&[
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_JOB_NODELIST", "n"),
        ]);
        assert_eq!(p.world, 2);
    }

    #[test]
    fn lists_of_hosts() {
        for (list, first) in [
            ("node[003-007,9]", "node003"),
            ("node9", "node9"),
            ("a1,b[2-4]", "a1"),
            ("r[1-2]n[05,07]", "r1n05"),
            ("rack[2]-gpu.site.org,x", "rack2-gpu.site.org"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
        }
        for list in ["", "node[", "node[]", "node[a-b]", ",a", "no de", "a]"] {
            assert_eq!(first_host(list), None, "{list}");
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        for (set, expected) in [
            (&[("RANK", "x"), ("WORLD_SIZE", "2")][..], r#"RANK is "x"; expected a whole number"#),
            (&[("RANK", "-1"), ("WORLD_SIZE", "2")], r#"RANK is "-1"; expected a whole number"#),
            (
                &[("RANK", "2"), ("WORLD_SIZE", "2")],
                r#"RANK is "2"; expected less than WORLD_SIZE, which is 2"#,
            ),
            (&[("RANK", "0"), ("WORLD_SIZE", "0")], r#"WORLD_SIZE is "0"; expected at least 1"#),
            (&[("RANK", "0")], r#"RANK is "0", but WORLD_SIZE is not set"#),
            (&[("WORLD_SIZE", "2")], r#"WORLD_SIZE is "2", but RANK is not set"#),
            (&[("RANK", "0"), ("WORLD_SIZE", "2")], "MASTER_ADDR is not set; expected a name or address"),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "70000")],
                r#"MASTER_PORT is "70000"; expected a port"#,
            ),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")],
                r#"LOCAL_RANK is "2"; expected less than LOCAL_WORLD_SIZE, which is 2"#,
            ),
            (
                &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("WORLD_SIZE", "8")],
                r#"WORLD_SIZE is "8"; expected 4 as SLURM_NTASKS says"#,
            ),
            (
                &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_NODELIST", "n[")],
                r#"SLURM_JOB_NODELIST is "n["; expected a list of hosts"#,
            ),
        ] {
            let e = refused(set);
            assert!(e.contains(expected), "{e}");
        }
    }
}
