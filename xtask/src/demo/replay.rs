//! Runs `tarn replay` on a trace and reads its log of acknowledged replies for progress.
//! `replay_report.rs` evaluates the report.

use std::{
    fmt,
    fs::{self, File},
    io::{self, BufRead, BufReader, IsTerminal, Read, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use flate2::read::MultiGzDecoder;

use super::{
    rack::Rack,
    replay_report::ReplayReport,
    scratch::ScratchFolders,
    service::{self, Programs, Services, new_command},
};
use crate::{failure::Failure, wait::Interrupt};
use local_rack::Process;

/// Time limit for a fraction of the VMs to be placed. The demo then continues, because a small rack
/// may reject too many VMs to reach the fraction.
const PLACEMENT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time without a reply after which the replay is considered stuck. It is longer than all time
/// limits of `tarn replay`.
const REPLY_TIMEOUT: Duration = Duration::from_secs(180);
/// First two bytes of every gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
/// Text that identifies a log line about a reservation.
const RESERVE_ACTION: &str = "\"action\":\"reserve\"";

/// Trace of VMs, and the options of its replay.
#[derive(Debug)]
pub struct Trace {
    /// Value of the argument TRACE of `tarn replay`.
    source: String,
    limit: u64,
    seed: u64,
    /// Upper bound on the number of VMs to replay.
    vms: u64,
}

impl Trace {
    /// Selects the first `limit` VMs of a file. Without a file, the trace is generated from the
    /// seed.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn new(file: Option<&Path>, limit: u64, seed: u64) -> Result<Self, Failure> {
        let Some(file) = file else {
            return Ok(Self { source: format!("generated:{limit}"), limit, seed, vms: limit });
        };
        let rows = count_rows(file).map_err(Failure::file_error("read", file))?;
        let absolute = fs::canonicalize(file).map_err(Failure::file_error("find", file))?;
        Ok(Self { source: absolute.display().to_string(), limit, seed, vms: rows.min(limit) })
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} VMs of {}", self.vms, self.source)
    }
}

fn count_rows(file: &Path) -> io::Result<u64> {
    let mut text = BufReader::new(File::open(file)?);
    let is_gzip = text.fill_buf()?.starts_with(&GZIP_MAGIC);
    let text: Box<dyn Read> = if is_gzip { Box::new(MultiGzDecoder::new(text)) } else { Box::new(text) };
    BufReader::new(text).split(b'\n').try_fold(0, |rows, row| row.map(|_| rows + 1))
}

/// Running process of `tarn replay`.
#[derive(Debug)]
pub struct Replay {
    process: Process,
    vms: u64,
    replies: ReplyLog,
    report: PathBuf,
}

impl Replay {
    /// Starts `tarn replay`.
    ///
    /// # Errors
    /// Returns an error if `tarn` does not start.
    pub fn start(
        programs: &Programs,
        rack: &Rack,
        trace: &Trace,
        scratch: &ScratchFolders,
    ) -> Result<Self, Failure> {
        let (log, report) = (scratch.file("replies.jsonl"), scratch.file("report.json"));
        let mut command = new_command(&programs.tarn);
        command.arg("replay").arg(&trace.source).arg("--rack").arg(&rack.file);
        command.args(["--limit", &trace.limit.to_string(), "--seed", &trace.seed.to_string()]);
        command.arg("--log").arg(&log).arg("--json").arg(&report);
        let process = service::start("tarn replay", &mut command, scratch.file("replay.log"))?;
        Ok(Self { process, vms: trace.vms, replies: ReplyLog::new(log), report })
    }

    /// Waits until this fraction of the VMs is placed, the replay ends, or a time limit expires.
    ///
    /// # Errors
    /// Returns an error if a process of the rack ends or the user interrupts the demo.
    pub fn wait_for_placements(
        &mut self,
        fraction: f64,
        interrupt: &Interrupt,
        services: &mut Services<'_>,
    ) -> Result<(), Failure> {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let target = (self.vms as f64 * fraction) as u64;
        let start = Instant::now();
        // If the trace has ended, the demo continues on an idle rack.
        while self.replies.read()? < target
            && start.elapsed() < PLACEMENT_TIMEOUT
            && self.process.exit_status()?.is_none()
        {
            services.check_running()?;
            self.print_progress();
            interrupt.pause()?;
        }
        Ok(())
    }

    /// Waits for the end of the replay and returns its report.
    ///
    /// # Errors
    /// Returns an error if the replay fails, a process of the rack ends, or the user interrupts the
    /// demo.
    pub fn finish(
        mut self,
        interrupt: &Interrupt,
        services: &mut Services<'_>,
    ) -> Result<ReplayReport, Failure> {
        while self.process.exit_status()?.is_none() {
            services.check_running()?;
            self.replies.read()?;
            if self.replies.idle_time() > REPLY_TIMEOUT {
                eprintln!("{}", self.process.log_tail());
                return Err(Failure::TimedOut { event: "a reply to the replay", limit: REPLY_TIMEOUT });
            }
            self.print_progress();
            interrupt.pause()?;
        }
        let output = self.process.log_tail();
        match self.process.exit_status()?.filter(|status| !status.success()) {
            // A report describes the failure better than the exit code.
            Some(status) if !self.report.exists() => {
                eprintln!("{output}");
                Err(Failure::Step { step: "tarn replay".to_owned(), status })
            }
            _ => ReplayReport::read(&self.report),
        }
    }

    /// Prints the number of placed VMs, if stderr is a terminal.
    fn print_progress(&self) {
        let mut terminal = io::stderr();
        if terminal.is_terminal() {
            // The progress is for information only, so errors are ignored.
            let _ = write!(terminal, "\r    {} of {} VMs placed \r", self.replies.reserved, self.vms);
            let _ = terminal.flush();
        }
    }
}

/// Reader of the growing log of acknowledged replies, which has one reply per line.
#[derive(Debug)]
struct ReplyLog {
    path: PathBuf,
    reader: Option<BufReader<File>>,
    /// Incomplete last line that was read so far.
    partial_line: String,
    /// Number of reservations that were acknowledged.
    reserved: u64,
    /// Time at which the last complete line was read.
    last_reply: Instant,
}

impl ReplyLog {
    fn new(path: PathBuf) -> Self {
        Self { path, reader: None, partial_line: String::new(), reserved: 0, last_reply: Instant::now() }
    }

    /// Reads new lines of the log, and returns the number of reservations so far.
    fn read(&mut self) -> Result<u64, Failure> {
        // `tarn replay` creates the file with the first reply.
        self.reader = self.reader.take().or_else(|| File::open(&self.path).ok().map(BufReader::new));
        let Some(log) = &mut self.reader else { return Ok(0) };
        while log.read_line(&mut self.partial_line).map_err(Failure::file_error("read", &self.path))? > 0 {
            if self.partial_line.ends_with('\n') {
                self.reserved += u64::from(self.partial_line.contains(RESERVE_ACTION));
                self.partial_line.clear();
                self.last_reply = Instant::now();
            }
        }
        Ok(self.reserved)
    }

    /// Returns the time since the last reply.
    fn idle_time(&self) -> Duration {
        self.last_reply.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_complete_lines_of_growing_log_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("replies.jsonl");
        let mut replies = ReplyLog::new(path.clone());
        assert_eq!(replies.read().unwrap(), 0);
        let mut log = File::create(&path).unwrap();
        log.write_all(b"{\"action\":\"reserve\"}\n{\"action\":\"commit\"}\n{\"action\":\"res").unwrap();
        assert_eq!(replies.read().unwrap(), 1);
        log.write_all(b"erve\"}\n").unwrap();
        assert_eq!(replies.read().unwrap(), 2);
    }

    #[test]
    fn number_of_vms_is_limited_by_rows_and_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.csv");
        fs::write(&path, "vm_id\na\nb\n").unwrap();
        assert_eq!(Trace::new(Some(&path), 2, 1).unwrap().vms, 2);
        assert_eq!(Trace::new(Some(&path), 9, 1).unwrap().vms, 3);
        assert_eq!(Trace::new(None, 9, 1).unwrap().vms, 9);
    }
}
