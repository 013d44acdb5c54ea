//! The MPI library behind functions that keep its rules: every call that is `unsafe` stands here.
//!
//! Buffers that the library reads or writes belong to a [`Flight`]; one that does not end well keeps its buffer for ever
//! rather than free what the library may still touch.

use super::super::error::{CollectiveError, Result};
use mpi::ffi;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// An error code of the library.
#[derive(Clone, Copy, Debug)]
pub struct Code(c_int);

type Answer<T> = std::result::Result<T, Code>;

fn checked(code: c_int) -> Answer<()> {
    if code == ffi::MPI_SUCCESS as c_int { Ok(()) } else { Err(Code(code)) }
}

impl Code {
    /// Whether a message was longer than the place made for it.
    pub fn is_truncation(self) -> bool {
        let mut class = 0;
        // SAFETY: writes one int.
        unsafe { ffi::MPI_Error_class(self.0, &mut class) };
        class == ffi::MPI_ERR_TRUNCATE as c_int
    }
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = [0u8; 1024];
        let mut len: c_int = 0;
        // SAFETY: MPI_MAX_ERROR_STRING is 256 in Open MPI and 512 in MPICH, less than the place given.
        unsafe { ffi::MPI_Error_string(self.0, text.as_mut_ptr().cast(), &mut len) };
        let text = &text[..usize::try_from(len).unwrap_or(0).min(text.len())];
        write!(f, "{}", String::from_utf8_lossy(text))
    }
}

/// How the library was started.
struct Started {
    /// Whether several threads may call at once.
    multiple: bool,
}

static STARTED: OnceLock<std::result::Result<Started, String>> = OnceLock::new();
static ENDED: AtomicBool = AtomicBool::new(false);
static GATE: Mutex<()> = Mutex::new(());

/// Runs a call of the library, one at a time where it allows no more.
fn call<T>(f: impl FnOnce() -> T) -> T {
    let multiple = matches!(STARTED.get(), Some(Ok(s)) if s.multiple);
    let _held = (!multiple).then(|| GATE.lock().unwrap_or_else(PoisonError::into_inner));
    f()
}

fn start() -> std::result::Result<Started, String> {
    let mut provided: c_int = 0;
    // SAFETY: the standard allows null for both arguments; the threading constants are read only.
    let (code, serialized, multiple) = unsafe {
        let wanted = ffi::RSMPI_THREAD_MULTIPLE;
        let code = ffi::MPI_Init_thread(std::ptr::null_mut(), std::ptr::null_mut(), wanted, &mut provided);
        (code, ffi::RSMPI_THREAD_SERIALIZED, wanted)
    };
    checked(code).map_err(|e| format!("MPI_Init failed: {e}"))?;
    if provided < serialized {
        return Err("this MPI library may only be called by the thread that started it (MPI_THREAD_FUNNELED or less), \
                    but operations run in the background"
            .into());
    }
    Ok(Started { multiple: provided >= multiple })
}

/// A group of processes.
#[derive(Clone, Copy)]
pub struct Group(ffi::MPI_Comm);

// SAFETY: a communicator is a name, an integer or the address of an object that lives until MPI_Comm_free, which is never
// called; any thread may use it, one at a time or not as `call` takes care of.
unsafe impl Send for Group {}
// SAFETY: as above.
unsafe impl Sync for Group {}

impl Group {
    /// All processes that mpirun started. Starts the library the first time.
    ///
    /// # Errors
    /// If the library does not start, allows too few threads, or has ended.
    pub fn world() -> Result<Group> {
        if ENDED.load(Ordering::SeqCst) {
            return Err(CollectiveError::Join(
                "MPI has ended in this process and cannot be started again".into(),
            ));
        }
        STARTED.get_or_init(start).as_ref().map_err(|why| CollectiveError::Unavailable {
            transport: "mpi",
            why: why.clone(),
            instead: "use an MPI with MPI_THREAD_MULTIPLE (Open MPI, MPICH), or --collective tcp".into(),
        })?;
        // SAFETY: a constant of the library.
        Self::returning(unsafe { ffi::RSMPI_COMM_WORLD })
            .map_err(|e| CollectiveError::Join(format!("MPI: {e}")))
    }

    /// Errors come back as codes rather than end the process.
    fn returning(comm: ffi::MPI_Comm) -> Answer<Group> {
        // SAFETY: `comm` is a valid communicator.
        checked(call(|| unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) }))?;
        Ok(Group(comm))
    }

    /// This process's number.
    pub fn rank(self) -> usize {
        let mut n: c_int = 0;
        // SAFETY: writes one int.
        call(|| unsafe { ffi::MPI_Comm_rank(self.0, &mut n) });
        n as usize
    }

    /// Processes in all.
    pub fn size(self) -> usize {
        let mut n: c_int = 0;
        // SAFETY: writes one int.
        call(|| unsafe { ffi::MPI_Comm_size(self.0, &mut n) });
        n as usize
    }

    /// A group of some of this one, which all of them call; the others do not.
    pub fn some(self, members: &[usize], tag: c_int) -> Answer<Group> {
        let ranks: Vec<c_int> = members.iter().map(|m| *m as c_int).collect();
        // SAFETY: the groups are made, used and freed here; `ranks` are distinct and in range as the caller's members are.
        let comm = call(|| unsafe {
            let (mut all, mut few) = (ffi::RSMPI_GROUP_NULL, ffi::RSMPI_GROUP_NULL);
            let mut comm = ffi::RSMPI_COMM_NULL;
            checked(ffi::MPI_Comm_group(self.0, &mut all))?;
            checked(ffi::MPI_Group_incl(all, ranks.len() as c_int, ranks.as_ptr(), &mut few))?;
            checked(ffi::MPI_Comm_create_group(self.0, few, tag, &mut comm))?;
            ffi::MPI_Group_free(&mut few);
            ffi::MPI_Group_free(&mut all);
            Ok(comm)
        })?;
        Self::returning(comm)
    }

    /// Begins to send the first `len` bytes of `bytes`.
    pub fn send(self, bytes: Vec<u64>, len: usize, to: usize, tag: c_int) -> Answer<Flight> {
        let mut flight = Flight { into: bytes, from: vec![], request: null(), pending: false };
        assert!(len <= flight.into.len() * 8);
        // SAFETY: the flight owns the bytes, and does not free them before the library is done with them.
        checked(call(|| unsafe {
            let (at, byte) = (flight.into.as_ptr().cast(), ffi::RSMPI_UINT8_T);
            ffi::MPI_Isend(at, len as c_int, byte, to as c_int, tag, self.0, &mut flight.request)
        }))?;
        flight.pending = true;
        Ok(flight)
    }

    /// Begins to receive up to `len` bytes.
    pub fn receive(self, len: usize, from: usize, tag: c_int) -> Answer<Flight> {
        let mut flight =
            Flight { into: vec![0; len.div_ceil(8)], from: vec![], request: null(), pending: false };
        // SAFETY: as in `send`; the place is as long as the count says.
        checked(call(|| unsafe {
            let (at, byte) = (flight.into.as_mut_ptr().cast(), ffi::RSMPI_UINT8_T);
            ffi::MPI_Irecv(at, len as c_int, byte, from as c_int, tag, self.0, &mut flight.request)
        }))?;
        flight.pending = true;
        Ok(flight)
    }

    /// Begins the sum of f32 over all processes; [`Flight::floats`] has it afterwards.
    ///
    /// # Panics
    /// If there are 2³¹ elements or more.
    pub fn sum(self, data: &[f32]) -> Answer<Flight> {
        let count = c_int::try_from(data.len()).expect("cut by the caller");
        let into = vec![0; data.len().div_ceil(2)];
        let mut flight = Flight { into, from: data.to_vec(), request: null(), pending: false };
        // SAFETY: the flight owns both ends, which are as long as the count says and do not overlap.
        checked(call(|| unsafe {
            let (from, into) = (flight.from.as_ptr().cast(), flight.into.as_mut_ptr().cast());
            let (float, sum) = (ffi::RSMPI_FLOAT, ffi::RSMPI_SUM);
            ffi::MPI_Iallreduce(from, into, count, float, sum, self.0, &mut flight.request)
        }))?;
        flight.pending = true;
        Ok(flight)
    }

    /// Ends every process of the job with this exit code.
    pub fn abort(self, code: i32) {
        if !ENDED.load(Ordering::SeqCst) {
            // SAFETY: does not return, or returns an error that changes nothing.
            call(|| unsafe { ffi::MPI_Abort(self.0, code) });
        }
    }
}

/// Ends the library in this process, after which no other call may be made; the other processes do the same.
pub fn end() {
    if !ENDED.swap(true, Ordering::SeqCst) {
        // SAFETY: started, as there is a group, and not ended before.
        call(|| unsafe { ffi::MPI_Finalize() });
    }
}

/// Whether [`end`] was called.
pub fn has_ended() -> bool {
    ENDED.load(Ordering::SeqCst)
}

fn null() -> ffi::MPI_Request {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

/// An operation of the library in progress, with its buffers.
pub struct Flight {
    into: Vec<u64>,
    from: Vec<f32>,
    request: ffi::MPI_Request,
    pending: bool,
}

impl Flight {
    /// Whether it is done: the bytes that moved.
    pub fn test(&mut self) -> Answer<Option<usize>> {
        let (mut done, mut count) = (0, 0);
        let mut status = MaybeUninit::<ffi::MPI_Status>::zeroed();
        // SAFETY: the request is this flight's; the status is written before it is read.
        checked(call(|| unsafe {
            match ffi::MPI_Test(&mut self.request, &mut done, status.as_mut_ptr()) {
                code if code != ffi::MPI_SUCCESS as c_int || done == 0 => code,
                _ => ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut count),
            }
        }))?;
        if done == 0 {
            return Ok(None);
        }
        self.pending = false;
        Ok(Some(usize::try_from(count).unwrap_or(0)))
    }

    /// What arrived.
    ///
    /// # Panics
    /// If it is not done.
    pub fn bytes(&self, len: usize) -> &[u8] {
        assert!(!self.pending);
        &bytemuck::cast_slice(&self.into)[..len]
    }

    /// The sum.
    ///
    /// # Panics
    /// If it is not done.
    pub fn floats(&self) -> &[f32] {
        assert!(!self.pending);
        &bytemuck::cast_slice(&self.into)[..self.from.len()]
    }

    /// The buffer, for another.
    pub fn into_buffer(mut self) -> Vec<u64> {
        assert!(!self.pending);
        std::mem::take(&mut self.into)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.pending {
            std::mem::forget(std::mem::take(&mut self.into));
            std::mem::forget(std::mem::take(&mut self.from));
        }
    }
}
