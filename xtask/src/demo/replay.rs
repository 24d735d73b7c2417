//! Replay of a trace by `tarn replay`, observed through its log of acknowledged replies.
//! `verdict.rs` evaluates its report.

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
    scratch::Scratch,
    service::{Programs, Service, Services, command},
    verdict::Verdict,
};
use crate::{failure::Failure, wait::Patience};

/// After so long without having reached a part of the trace the story goes on all the same: a small rack may turn most of
/// the VMs away, and never get there.
const PART_WITHIN: Duration = Duration::from_secs(3);
/// After so long without a reply a replay is taken to be stuck; it waits less itself for anything.
const REPLY_WITHIN: Duration = Duration::from_secs(180);
/// How a gzipped file begins.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Key of a log line about placed memory.
const RESERVED: &str = "\"action\":\"reserve\"";

/// Trace and options.
#[derive(Debug)]
pub struct Trace {
    /// As `tarn replay` takes it.
    source: String,
    limit: u64,
    seed: u64,
    /// At most so many VMs arrive.
    vms: u64,
}

impl Trace {
    /// A file, or else one made from the seed; the first `limit` VMs of it.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn new(file: Option<&Path>, limit: u64, seed: u64) -> Result<Self, Failure> {
        let Some(file) = file else {
            return Ok(Self { source: format!("generated:{limit}"), limit, seed, vms: limit });
        };
        let rows = rows(file).map_err(Failure::file("read", file))?;
        let absolute = fs::canonicalize(file).map_err(Failure::file("find", file))?;
        Ok(Self { source: absolute.display().to_string(), limit, seed, vms: rows.min(limit) })
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} VMs of {}", self.vms, self.source)
    }
}

fn rows(file: &Path) -> io::Result<u64> {
    let mut text = BufReader::new(File::open(file)?);
    let zipped = text.fill_buf()?.starts_with(&GZIP);
    let text: Box<dyn Read> = if zipped { Box::new(MultiGzDecoder::new(text)) } else { Box::new(text) };
    BufReader::new(text).split(b'\n').try_fold(0, |rows, row| row.map(|_| rows + 1))
}

/// A running replay.
#[derive(Debug)]
pub struct Replay {
    process: Service,
    vms: u64,
    replies: Replies,
    report: PathBuf,
}

impl Replay {
    /// Starts it.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(
        programs: &Programs,
        rack: &Rack,
        trace: &Trace,
        scratch: &Scratch,
    ) -> Result<Self, Failure> {
        let (log, report) = (scratch.file("replies.jsonl"), scratch.file("report.json"));
        let mut command = command(&programs.tarn);
        command.arg("replay").arg(&trace.source).arg("--rack").arg(&rack.file);
        command.args(["--limit", &trace.limit.to_string(), "--seed", &trace.seed.to_string()]);
        command.arg("--log").arg(&log).arg("--json").arg(&report);
        let process = Service::start(&mut command, scratch.file("replay.log"))?;
        Ok(Self { process, vms: trace.vms, replies: Replies::of(log), report })
    }

    /// Waits until this part of the VMs was given memory, the replay is over, or it has been long enough.
    ///
    /// # Errors
    /// A process of the rack ended, or the user interrupts.
    pub fn reach(
        &mut self,
        part: f64,
        patience: &Patience,
        services: &mut Services<'_>,
    ) -> Result<(), Failure> {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let enough = (self.vms as f64 * part) as u64;
        let begun = Instant::now();
        // After the end of a trace the remaining steps happen on an idle rack.
        while self.replies.read()? < enough
            && begun.elapsed() < PART_WITHIN
            && self.process.ended()?.is_none()
        {
            services.still_run()?;
            self.show();
            patience.pause()?;
        }
        Ok(())
    }

    /// Waits for its end and returns its report.
    ///
    /// # Errors
    /// It failed, a process of the rack ended, or the user interrupts.
    pub fn finish(mut self, patience: &Patience, services: &mut Services<'_>) -> Result<Verdict, Failure> {
        while self.process.ended()?.is_none() {
            services.still_run()?;
            self.replies.read()?;
            if self.replies.silent() > REPLY_WITHIN {
                eprintln!("{}", self.process.last_words());
                return Err(Failure::Late { what: "a reply to the replay", within: REPLY_WITHIN });
            }
            self.show();
            patience.pause()?;
        }
        let said = self.process.last_words();
        match self.process.ended()?.filter(|status| !status.success()) {
            // Its report is more precise than its exit code, if it exists.
            Some(status) if !self.report.exists() => {
                eprintln!("{said}");
                Err(Failure::Step { step: "tarn replay".to_owned(), status })
            }
            _ => Verdict::read(&self.report),
        }
    }

    /// Prints the progress.
    fn show(&self) {
        let mut terminal = io::stderr();
        if terminal.is_terminal() {
            // Progress that cannot be shown is none that matters.
            let _ = write!(terminal, "\r    {} of {} VMs placed \r", self.replies.reserved, self.vms);
            let _ = terminal.flush();
        }
    }
}

/// The log of acknowledged replies, read on as it grows: one line for each.
#[derive(Debug)]
struct Replies {
    path: PathBuf,
    open: Option<BufReader<File>>,
    /// Returns the beginning of an incomplete line.
    begun: String,
    /// Replies that gave memory to a VM.
    reserved: u64,
    /// When the last reply was read.
    heard: Instant,
}

impl Replies {
    fn of(path: PathBuf) -> Self {
        Self { path, open: None, begun: String::new(), reserved: 0, heard: Instant::now() }
    }

    /// Reads new lines, and returns the number of placements so far.
    fn read(&mut self) -> Result<u64, Failure> {
        // It is there once the first reply is.
        self.open = self.open.take().or_else(|| File::open(&self.path).ok().map(BufReader::new));
        let Some(log) = &mut self.open else { return Ok(0) };
        while log.read_line(&mut self.begun).map_err(Failure::file("read", &self.path))? > 0 {
            if self.begun.ends_with('\n') {
                self.reserved += u64::from(self.begun.contains(RESERVED));
                self.begun.clear();
                self.heard = Instant::now();
            }
        }
        Ok(self.reserved)
    }

    /// For how long nothing was replied.
    fn silent(&self) -> Duration {
        self.heard.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growing_log_is_counted_line_by_whole_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("replies.jsonl");
        let mut replies = Replies::of(path.clone());
        assert_eq!(replies.read().unwrap(), 0);
        let mut log = File::create(&path).unwrap();
        log.write_all(b"{\"action\":\"reserve\"}\n{\"action\":\"commit\"}\n{\"action\":\"res").unwrap();
        assert_eq!(replies.read().unwrap(), 1);
        log.write_all(b"erve\"}\n").unwrap();
        assert_eq!(replies.read().unwrap(), 2);
    }

    #[test]
    fn a_trace_has_no_more_vms_than_rows_or_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.csv");
        fs::write(&path, "vm_id\na\nb\n").unwrap();
        assert_eq!(Trace::new(Some(&path), 2, 1).unwrap().vms, 2);
        assert_eq!(Trace::new(Some(&path), 9, 1).unwrap().vms, 3);
        assert_eq!(Trace::new(None, 9, 1).unwrap().vms, 9);
    }
}
