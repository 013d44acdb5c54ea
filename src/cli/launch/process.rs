//! The operating system's part of the launcher: processes that die with it, and the signals that it is sent.

use std::io;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{self, Receiver};

/// What the launcher is told from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// End, by this signal: it is passed on.
    End(i32),
    /// Ctrl-Z: pause until told to continue.
    Pause,
}

/// What is done to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// This signal is passed on.
    Signal(i32),
    /// It is asked to end (SIGTERM).
    Terminate,
    /// It is killed, and whatever it started.
    Kill,
    /// It is stopped (SIGSTOP).
    Pause,
    /// It goes on (SIGCONT).
    Continue,
}

/// A rank's process, the leader of a process group of its own: the terminal's Ctrl-C does not reach it, so that it gets
/// each signal once, from the launcher.
#[derive(Debug)]
pub struct Process {
    child: Child,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts a process that ends when the calling **thread** ends, on Linux also where that is killed. (Elsewhere only an
    /// orderly end is passed on.) The thread must therefore stay as long as the process.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        isolate(command);
        Ok(Process { child: command.spawn()?, ended: None })
    }

    /// The child, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, once it has. Never waits. What the process leaves behind in its group is killed.
    pub fn poll(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_none() && self.has_ended() {
            self.ended = self.child.try_wait()?;
        }
        Ok(self.ended)
    }

    /// Sees its end without collecting it: until then no other process can get its id, so that the group that is
    /// killed is its own.
    #[cfg(target_os = "linux")]
    fn has_ended(&mut self) -> bool {
        use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let ended = !matches!(waitid(Id::Pid(self.pid()), flags), Ok(WaitStatus::StillAlive));
        if ended {
            self.act(Action::Kill);
        }
        ended
    }

    #[cfg(not(target_os = "linux"))]
    fn has_ended(&mut self) -> bool {
        true
    }

    #[cfg(unix)]
    fn pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(self.child.id().cast_signed())
    }

    /// Does this to the process's group; nothing once it has ended.
    #[cfg(unix)]
    pub fn act(&mut self, action: Action) {
        use nix::sys::signal::{Signal, killpg};
        let signal = match action {
            Action::Signal(n) => Signal::try_from(n).unwrap_or(Signal::SIGTERM),
            Action::Terminate => Signal::SIGTERM,
            Action::Kill => Signal::SIGKILL,
            Action::Pause => Signal::SIGSTOP,
            Action::Continue => Signal::SIGCONT,
        };
        if self.ended.is_none() {
            // fails only where it is gone, which the next poll sees
            let _ = killpg(self.pid(), signal);
        }
    }

    /// Kills it; the console passes Ctrl-C to all of its processes by itself, and there is no other way to ask.
    #[cfg(not(unix))]
    pub fn act(&mut self, action: Action) {
        if self.ended.is_none() && matches!(action, Action::Kill | Action::Terminate) {
            let _ = self.child.kill();
        }
    }
}

impl Drop for Process {
    /// None stays behind, whatever way the launcher leaves.
    fn drop(&mut self) {
        if !matches!(self.poll(), Ok(Some(_))) {
            self.act(Action::Kill);
            let _ = self.child.wait();
        }
    }
}

#[cfg(unix)]
fn isolate(command: &mut Command) {
    use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
    use std::os::unix::process::CommandExt;
    #[cfg(target_os = "linux")]
    let parent = nix::unistd::getpid();
    let prepare = move || {
        #[cfg(target_os = "linux")]
        {
            nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
            // it may have died before that was set
            if nix::unistd::getppid() != parent {
                return Err(nix::errno::Errno::ESRCH.into());
            }
        }
        // its group is not the terminal's foreground, and may write there all the same (`stty tostop`); and a shell's
        // background job is born deaf to SIGINT, which the launcher hears and passes on
        let ways = [
            (Signal::SIGTTOU, SigHandler::SigIgn),
            (Signal::SIGINT, SigHandler::SigDfl),
            (Signal::SIGTERM, SigHandler::SigDfl),
        ];
        for (which, way) in ways {
            // SAFETY: no handler is installed.
            unsafe { signal(which, way) }?;
        }
        // a new process inherits what the launcher blocks (see `listen`), and would be deaf to all that is passed on
        SigSet::empty().thread_set_mask()?;
        Ok(())
    };
    command.process_group(0);
    // SAFETY: between fork and exec it makes a few system calls and allocates nothing.
    unsafe { command.pre_exec(prepare) };
}

#[cfg(not(unix))]
fn isolate(_: &mut Command) {}

/// From here on SIGINT, SIGTERM, SIGHUP and SIGTSTP end or stop nothing by themselves: they arrive in the channel. To be
/// called while the program has one thread, as threads take over what their parent blocks; so do new processes, in which
/// [`Process::start`] unblocks them. SIGHUP stays ignored under `nohup`.
#[cfg(unix)]
pub fn listen() -> io::Result<Receiver<Notice>> {
    use nix::sys::signal::{SigSet, Signal};
    let mut set = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    for signal in [Signal::SIGHUP, Signal::SIGTSTP] {
        if !is_ignored(signal)? {
            set.add(signal);
        }
    }
    set.thread_block()?;
    let (send, receive) = mpsc::channel();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        while let Ok(signal) = set.wait() {
            let notice = match signal {
                Signal::SIGTSTP => Notice::Pause,
                other => Notice::End(other as i32),
            };
            if send.send(notice).is_err() {
                return;
            }
        }
    })?;
    Ok(receive)
}

#[cfg(unix)]
fn is_ignored(signal: nix::sys::signal::Signal) -> io::Result<bool> {
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, sigaction};
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: no handler is installed, and what was there before is put back; there is one thread.
    let before = unsafe { sigaction(signal, &default) }?;
    // SAFETY: as above.
    unsafe { sigaction(signal, &before) }?;
    Ok(matches!(before.handler(), SigHandler::SigIgn))
}

/// From here on Ctrl-C arrives in the channel.
#[cfg(not(unix))]
pub fn listen() -> io::Result<Receiver<Notice>> {
    let (send, receive) = mpsc::channel();
    ctrlc::set_handler(move || {
        let _ = send.send(Notice::End(2));
    })
    .map_err(io::Error::other)?;
    Ok(receive)
}

/// Stops this program as Ctrl-Z would have; returns when it is continued.
pub fn pause_self() {
    #[cfg(unix)]
    let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGSTOP);
}

/// The signal that ended a process.
pub fn signal_of(status: ExitStatus) -> Option<i32> {
    #[cfg(unix)]
    return std::os::unix::process::ExitStatusExt::signal(&status);
    #[cfg(not(unix))]
    {
        let _ = status;
        None
    }
}

/// `9 (SIGKILL)`.
pub fn signal_name(signal: i32) -> String {
    #[cfg(unix)]
    if let Ok(known) = nix::sys::signal::Signal::try_from(signal) {
        return format!("{signal} ({})", known.as_str());
    }
    signal.to_string()
}

/// The code of an end as a shell has it: 128 and the signal for those that a signal ended.
pub fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| signal_of(status).map(|s| 128 + s)).unwrap_or(1);
    // what does not fit must not come out as success
    u8::try_from(code).unwrap_or(1)
}
