//! Reads a trace in chunks, and replays each chunk while the next one is read. A trace that is not in
//! the order of arrival is read again, sorted in memory, and then replayed.

use std::{cell::Cell, io::Read, path::Path, thread, time::Instant};

use cli_runtime::{Failure, open};
use indicatif::{ProgressBar, ProgressStyle};
use sim::{
    plan::{
        Cluster,
        input::{self, PlanInputError, PlannedVm, VmStream},
    },
    trace::{TraceColumn, TraceRows},
};
use units::limits::PLAN_CHUNK_VMS;

/// Template of the progress bar, in the syntax of indicatif. The position is that in the file.
const PROGRESS_TEMPLATE: &str = "{elapsed_precise} [{wide_bar}] {percent} %, {msg}, {eta} left";

/// Returns whether the owners in a trace are customers or applications instead of batches.
///
/// # Errors
/// [`Failure::File`] if the trace cannot be read or has an unknown layout.
pub(super) fn has_stable_owners(path: &Path) -> Result<bool, Failure> {
    open::table(path, |input| TraceRows::new(input).map(|rows| rows.has_stable_owners()))
}

/// Replays a trace: calls `consume` for all VMs, in chunks and in the order of arrival. `start`
/// creates the state of a replay.
///
/// # Errors
/// The errors of `start`, and [`Failure::File`] if the trace cannot be read, a value is invalid, the trace has no column
/// `socket` although `needs_socket` is set, or a pipe is not in the order of arrival.
pub(super) fn replay_trace<T: Send>(
    path: &Path,
    cluster: Cluster,
    needs_socket: bool,
    start: impl Fn() -> Result<T, Failure>,
    consume: impl Fn(&mut T, &[PlannedVm]) + Sync,
) -> Result<T, Failure> {
    let progress = Progress::new();
    let is_regular_file = path.metadata().is_ok_and(|metadata| metadata.is_file());
    let open_stream = |input| {
        let stream = VmStream::new(input, cluster)?;
        if needs_socket && !stream.has(TraceColumn::Socket) {
            return Err(ReadError::NoSocket);
        }
        Ok(stream)
    };
    let state = start()?;
    let streamed = open::table_through(
        path,
        |file| progress.wrap(file),
        |input| match replay_stream(open_stream(input)?, state, &consume, &progress) {
            Err(ReadError::Input(PlanInputError::OutOfOrder { .. })) if is_regular_file => Ok(None),
            result => result.map(Some),
        },
    )?;
    if let Some(state) = streamed {
        return Ok(state);
    }
    let vms = open::table_through(
        path,
        |file| progress.wrap(file),
        |input| input::sort_all(open_stream(input)?).map_err(ReadError::Input),
    )?;
    let mut state = start()?;
    vms.chunks(PLAN_CHUNK_VMS).for_each(|chunk| consume(&mut state, chunk));
    Ok(state)
}

/// Error while reading the trace of a plan.
#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error(transparent)]
    Input(#[from] PlanInputError),
    #[error("the trace has no column `socket`: must have it for --placement as-traced")]
    NoSocket,
}

fn replay_stream<T: Send>(
    mut stream: VmStream<impl std::io::BufRead>,
    mut state: T,
    consume: &(impl Fn(&mut T, &[PlannedVm]) + Sync),
    progress: &Progress,
) -> Result<T, ReadError> {
    let (mut chunk, mut next) = (Vec::new(), Vec::new());
    stream.read_chunk(&mut chunk, PLAN_CHUNK_VMS)?;
    while !chunk.is_empty() {
        progress.add(chunk.len());
        let replayed = &mut state;
        let read = thread::scope(|scope| {
            scope.spawn(|| consume(replayed, &chunk));
            stream.read_chunk(&mut next, PLAN_CHUNK_VMS)
        });
        read?;
        std::mem::swap(&mut chunk, &mut next);
    }
    Ok(state)
}

/// Progress bar on stderr, if that is a terminal, with the rate of VMs and the time left.
struct Progress {
    bar: ProgressBar,
    started: Instant,
    vms: Cell<usize>,
}

impl Progress {
    fn new() -> Self {
        let style = ProgressStyle::with_template(PROGRESS_TEMPLATE).expect("the template is valid");
        Self { bar: ProgressBar::new(0).with_style(style), started: Instant::now(), vms: Cell::new(0) }
    }

    /// Returns a reader of the file that moves the bar. A pipe has no length.
    fn wrap(&self, file: std::fs::File) -> Box<dyn Read> {
        self.bar.set_length(file.metadata().map_or(0, |metadata| metadata.len()));
        self.bar.set_position(0);
        Box::new(self.bar.wrap_read(file))
    }

    fn add(&self, vms: usize) {
        self.vms.set(self.vms.get() + vms);
        let seconds = self.started.elapsed().as_secs_f64().max(1e-3);
        self.bar.set_message(format!("{:.0} VMs/s", self.vms.get() as f64 / seconds));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
