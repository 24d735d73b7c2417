//! Compares the speed of guest memory with and without transparent huge pages.
//!
//! Goal: with huge pages, the first write to each page takes less time, and random reads take less
//! time.
//!
//! A small guest measures its own memory with the TSC. Runs with and without huge pages alternate.
//! The benchmark first writes to most of the available memory. Otherwise, on a virtual machine, a
//! run would also measure how the hypervisor provides memory at the first write. The benchmark sets
//! `shmem_enabled` of this machine, which requires root, and restores it.

use std::{
    fs,
    process::{ExitCode, Stdio},
};

use benches::{
    failure::Failure,
    programs::vmm_plugin,
    report::{Rounds, format_ratio, format_table, run_and_print},
};
use clap::Parser;
use tests::small_guests;
use tokio::process::Command;

/// Kernel setting of huge pages for memfds.
const SHMEM_ENABLED_PATH: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
/// Kernel file with the available memory.
const MEMINFO_PATH: &str = "/proc/meminfo";
/// Number of pages that the guest writes to.
const WRITE_COUNT: f64 = 131_072.0;
/// Number of random reads of the guest.
const READ_COUNT: f64 = 4_194_304.0;

/// Measure guest memory with and without huge pages
#[derive(Debug, Parser)]
struct Args {
    /// Number of guests with and without huge pages. The report shows medians
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=50))]
    rounds: u32,
    /// Flag that cargo passes to benchmarks, without effect
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    run_and_print("guest_huge_pages", measure(args.rounds)).await
}

/// Setting in the file [`SHMEM_ENABLED_PATH`] before the benchmark. Dropping the value restores the
/// setting.
struct PreviousSetting(String);

impl PreviousSetting {
    fn read() -> Result<Self, Failure> {
        let text = fs::read_to_string(SHMEM_ENABLED_PATH)
            .map_err(Failure::file_error("read", SHMEM_ENABLED_PATH))?;
        let selected = text.split(['[', ']']).nth(1).unwrap_or("never");
        Ok(Self(selected.to_owned()))
    }
}

impl Drop for PreviousSetting {
    fn drop(&mut self) {
        if let Err(error) = fs::write(SHMEM_ENABLED_PATH, &self.0) {
            eprintln!("cannot restore {SHMEM_ENABLED_PATH} to {}: {error}", self.0);
        }
    }
}

/// Measurements with one setting, in TSC ticks per access.
#[derive(Default)]
struct AccessTicks {
    first_write: Rounds,
    random_read: Rounds,
}

async fn measure(rounds: u32) -> Result<String, Failure> {
    if !small_guests::can_run_small_guests() {
        return Ok(String::new());
    }
    if !rustix::process::geteuid().is_root() {
        small_guests::report_skipped("guest memory with huge pages, which requires root");
        return Ok(String::new());
    }
    let vmm = vmm_plugin()?;
    let folder =
        tempfile::tempdir().map_err(Failure::file_error("create a folder in", std::env::temp_dir()))?;
    let kernel = folder.path().join("kernel");
    fs::write(&kernel, small_guests::measure_memory()).map_err(Failure::file_error("write", &kernel))?;
    write_available_memory()?;
    let previous = PreviousSetting::read()?;
    let settings = ["never", "advise"];
    let mut all = [AccessTicks::default(), AccessTicks::default()];
    for _ in 0..rounds {
        for (setting, ticks) in settings.iter().zip(&mut all) {
            fs::write(SHMEM_ENABLED_PATH, setting)
                .map_err(Failure::file_error("write", SHMEM_ENABLED_PATH))?;
            let mut guest = Command::new(&vmm);
            guest.args(["run", "--uid", "65534", "--gid", "65534", "--vm", "v", "--standalone"]);
            guest.args(["--memory", "size=1GiB", "--kernel"]).arg(&kernel);
            guest.arg("--run-dir").arg(folder.path().join("run")).kill_on_drop(true);
            let output = guest.stdin(Stdio::null()).output().await;
            let output = output.map_err(|source| Failure::Start { program: vmm.clone(), source })?;
            let console = String::from_utf8_lossy(&output.stdout).into_owned();
            let times: Vec<u64> =
                console.split_whitespace().map_while(|word| u64::from_str_radix(word, 16).ok()).collect();
            let [write, read] = times[..] else {
                let reply = format!("{console}{}", String::from_utf8_lossy(&output.stderr));
                return Err(Failure::UnexpectedReply { subject: "guest".to_owned(), reply });
            };
            ticks.add(write, read);
        }
    }
    drop(previous);
    let rows: Vec<_> = settings.iter().zip(&all).map(|(setting, ticks)| ticks.row(setting)).collect();
    let [without, with] = all;
    let median = |without: &Rounds, with: &Rounds| without.ratio_to(with).median();
    Ok(format!(
        "{}{}\n{}\n",
        format_table(&["shmem_enabled", "ticks per first write", "ticks per random read"], &rows),
        format_ratio("guest_huge_pages_first_write", median(&without.first_write, &with.first_write)),
        format_ratio("guest_huge_pages_random_read", median(&without.random_read, &with.random_read)),
    ))
}

/// Writes to two thirds of the available memory of this machine.
fn write_available_memory() -> Result<(), Failure> {
    let text = fs::read_to_string(MEMINFO_PATH).map_err(Failure::file_error("read", MEMINFO_PATH))?;
    let available = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: Option<usize> = available.and_then(|value| value.trim().strip_suffix(" kB")?.parse().ok());
    let kib =
        kib.ok_or_else(|| Failure::UnexpectedReply { subject: MEMINFO_PATH.to_owned(), reply: text })?;
    std::hint::black_box(vec![1_u8; kib * 2 / 3 * 1024]);
    Ok(())
}

impl AccessTicks {
    #[expect(clippy::cast_precision_loss, reason = "for a ratio")]
    fn add(&mut self, write: u64, read: u64) {
        self.first_write.add(write as f64 / WRITE_COUNT);
        self.random_read.add(read as f64 / READ_COUNT);
    }

    fn row(&self, setting: &str) -> Vec<String> {
        vec![setting.to_owned(), self.first_write.summary(), self.random_read.summary()]
    }
}
