//! Ranks as threads of one process: for tests, and for several adapters in one machine.

use super::error::{Cause, CollectiveError, Failure, Result};
use super::schedule::{Schedule, Step};
use super::transport::{Operation, Transport};
use super::work::{Aligned, Work};
use crate::sync::lock;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// What a rank has been sent, by sender, each with the operation's name.
#[derive(Debug, Default)]
struct Mail {
    from: Vec<VecDeque<(&'static str, Vec<u8>)>>,
}

#[derive(Debug)]
struct Hub {
    boxes: Vec<(Mutex<Mail>, Condvar)>,
    /// The first failure.
    down: Mutex<Option<Failure>>,
    /// Groups made by `split`, until every member has its part.
    children: Mutex<BTreeMap<(u64, u32), HashMap<usize, Local>>>,
    /// All groups made of this one: they fail with it.
    inner: Mutex<Vec<Weak<Hub>>>,
    timeout: Duration,
}

impl Hub {
    fn new(world: usize, timeout: Duration) -> Arc<Self> {
        let mail = || {
            let from = (0..world).map(|_| VecDeque::new()).collect();
            (Mutex::new(Mail { from }), Condvar::new())
        };
        Arc::new(Hub {
            boxes: (0..world).map(|_| mail()).collect(),
            down: Mutex::default(),
            children: Mutex::default(),
            inner: Mutex::default(),
            timeout,
        })
    }

    fn fail(&self, failure: &Failure) {
        lock(&self.down).get_or_insert_with(|| failure.clone());
        for (mail, bell) in &self.boxes {
            // held once, so that a rank about to wait hears the bell
            drop(lock(mail));
            bell.notify_all();
        }
        for hub in lock(&self.inner).iter().filter_map(Weak::upgrade) {
            hub.fail(failure);
        }
    }
}

/// One rank of a group of threads.
#[derive(Debug)]
pub struct Local {
    rank: usize,
    hub: Arc<Hub>,
    finished: AtomicBool,
}

impl Local {
    /// A group: one part a thread.
    pub fn group(world: usize, timeout: Duration) -> Vec<Local> {
        let hub = Hub::new(world, timeout);
        (0..world).map(|rank| Local { rank, hub: hub.clone(), finished: AtomicBool::new(false) }).collect()
    }

    fn down(&self, op: &Operation) -> Result<()> {
        match &*lock(&self.hub.down) {
            None => Ok(()),
            Some(failure) => Err(failure.clone().during(op)),
        }
    }
}

impl Transport for Local {
    fn name(&self) -> &'static str {
        "local"
    }
    fn rank(&self) -> usize {
        self.rank
    }
    fn world(&self) -> usize {
        self.hub.boxes.len()
    }
    fn lanes(&self) -> usize {
        1
    }

    fn run(&self, op: &Operation, schedule: &Schedule, work: &mut dyn Work) -> Result<()> {
        self.down(op)?;
        let steps = &schedule.steps;
        let mut done = vec![false; steps.len()];
        let mut left = steps.len();
        let mut scratch = Aligned::default();
        let (mail, bell) = &self.hub.boxes[self.rank];
        let mut deadline = Instant::now() + self.hub.timeout;
        while left > 0 {
            let ready = |done: &[bool], s: &Step| s.after.is_none_or(|a| done[a]);
            let mut moved = false;
            for i in 0..steps.len() {
                if done[i] || !steps[i].action.sends() || !ready(&done, &steps[i]) {
                    continue;
                }
                let mut bytes = Vec::with_capacity(work.len(&steps[i]));
                match work.view(&steps[i]) {
                    Some(view) => bytes.extend_from_slice(view),
                    None => work.encode(&steps[i], &mut bytes),
                }
                let (theirs, bell) = &self.hub.boxes[steps[i].peer];
                lock(theirs).from[self.rank].push_back((op.kind, bytes));
                bell.notify_one();
                (done[i], moved, left) = (true, true, left - 1);
            }
            // one receipt at a time: what it makes ready is sent, from the data as they are then
            let mut first = vec![true; self.world()];
            for i in 0..steps.len() {
                let s = &steps[i];
                if done[i] || s.action.sends() || !std::mem::take(&mut first[s.peer]) || !ready(&done, s) {
                    continue;
                }
                let Some((kind, bytes)) = lock(mail).from[s.peer].pop_front() else { continue };
                let expected = work.len(s);
                if kind != op.kind || bytes.len() != expected {
                    let (ours, theirs) = (op.kind, bytes.len());
                    let why = format!("{kind} of {theirs} bytes arrived in {ours}, which expects {expected}");
                    self.hub.fail(&Failure::new(self.rank, Cause::Refused, &why));
                    return Err(CollectiveError::Mismatch { rank: self.rank, peer: s.peer, why });
                }
                let aligned = scratch.bytes(bytes.len());
                aligned.copy_from_slice(&bytes);
                work.absorb(s, aligned);
                (done[i], moved, left) = (true, true, left - 1);
                break;
            }
            if moved || left == 0 {
                deadline = Instant::now() + self.hub.timeout;
                continue;
            }
            let waited: Vec<usize> = (0..steps.len())
                .filter(|&i| !done[i] && !steps[i].action.sends() && ready(&done, &steps[i]))
                .map(|i| steps[i].peer)
                .collect();
            let mut held = lock(mail);
            while waited.iter().all(|&p| held.from[p].is_empty()) {
                self.down(op)?;
                let Some(rest) = deadline.checked_duration_since(Instant::now()) else {
                    drop(held);
                    let silent = CollectiveError::silent(waited[0], &op.to_string(), self.hub.timeout);
                    if let CollectiveError::Lost { rank, why, .. } = &silent {
                        self.hub.fail(&Failure::new(*rank, Cause::Lost, why));
                    }
                    return Err(silent);
                };
                held = bell.wait_timeout(held, rest).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        Ok(())
    }

    fn split(&self, id: u64, members: &[usize], color: u32) -> Result<Box<dyn Transport>> {
        let mut children = lock(&self.hub.children);
        let parts = children.entry((id, color)).or_insert_with(|| {
            let group = Local::group(members.len(), self.hub.timeout);
            lock(&self.hub.inner).push(Arc::downgrade(&group[0].hub));
            members.iter().copied().zip(group).collect()
        });
        let mine = parts.remove(&self.rank).expect("a rank takes its part once");
        // that a part goes away is no failure while its rank stands
        mine.finish();
        if parts.is_empty() {
            children.remove(&(id, color));
        }
        Ok(Box::new(mine))
    }

    fn abort(&self, why: &str, for_good: bool) {
        self.hub.fail(&Failure::new(self.rank, Cause::stopped(for_good), why));
    }

    fn finish(&self) {
        self.finished.store(true, Ordering::Relaxed);
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if !self.finished.load(Ordering::Relaxed) {
            self.hub.fail(&Failure::new(self.rank, Cause::Lost, "it ended without saying so"));
        }
    }
}
