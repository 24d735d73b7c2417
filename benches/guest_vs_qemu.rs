//! Compares the boot time and the memory of the VMM `vmm-plugin` with QEMU's `microvm` and `pc`.
//!
//! Goals:
//! - From exec to the first guest instruction, `microvm` takes at least 3 times as long.
//! - From exec to the first guest program, `microvm` takes at least 1.3 times as long, and `pc` is
//!   not faster than `vmm-plugin`.
//! - Both QEMU machines use at least 5 times the memory.
//!
//! All VMMs run in turns on one emulated host with nested paging and one CPU, with the same kernel,
//! initrd and memory size. Emulation slows programs down more than it slows KVM down. This binary
//! also runs inside the emulated host (`--inside`), where it starts and measures the VMMs.

use std::{
    env,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use benches::{
    failure::Failure,
    guests::{self, Measurement, Vmm},
    programs::vmm_plugin,
    report::{Rounds, format_ratio, format_table, run_and_print},
};
use clap::Parser;
use emulated_host::{Artifacts, Host, Initrd};

/// Version of the guest kernel.
const KERNEL: &str = "6.12";
/// Prefix of the output lines that contain a measurement.
const MEASUREMENT_PREFIX: &str = "MEASURED ";

/// Measure the time until a guest runs, and the memory of its VMM
#[derive(Debug, Parser)]
struct Args {
    /// Number of boots of each VMM. The report shows medians of all boots
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=15))]
    rounds: u32,
    /// Measure on this machine. The benchmark sets this flag inside the emulated host
    #[arg(long, hide = true)]
    inside: bool,
    /// Flag that cargo passes to benchmarks, without effect
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    if args.inside {
        return run_and_print("guest_vs_qemu", async { measure_on_this_machine(args.rounds) }).await;
    }
    let cancellation = CancelOnDrop::default();
    let should_continue = cancellation.should_continue();
    let measure = tokio::task::spawn_blocking(move || measure_in_host(args.rounds, should_continue));
    run_and_print("guest_vs_qemu", async move {
        let _cancellation = cancellation; // dropped when this future is cancelled
        measure.await.expect("the measurement does not panic")
    })
    .await
}

/// Cancels the measurement in another thread when dropped.
#[derive(Default)]
struct CancelOnDrop(Arc<AtomicBool>);

impl CancelOnDrop {
    /// Returns a function that returns whether this value has not been dropped.
    fn should_continue(&self) -> impl Fn() -> bool + Send + 'static {
        let dropped = Arc::clone(&self.0);
        move || !dropped.load(Ordering::Relaxed)
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Boots an emulated host, runs all measurements on this host, and returns the report.
fn measure_in_host(rounds: u32, should_continue: impl Fn() -> bool) -> Result<String, Failure> {
    let artifacts = Artifacts::locate()?;
    let this_program = env::current_exe().map_err(Failure::file_error("find", "/proc/self/exe"))?;
    let script = format!("guest_vs_qemu --inside --rounds {rounds} 2>&1");
    let host = Host::new(&artifacts, &script)?;
    host.add_program(&vmm_plugin()?)?;
    host.add_program_as(&this_program, "guest_vs_qemu")?;
    host.add_qemu()?;
    let kernel = std::fs::read(artifacts.kernel_path(KERNEL))
        .map_err(Failure::file_error("read", artifacts.kernel_path(KERNEL)))?;
    let dir = tempfile::tempdir().map_err(Failure::file_error("create a folder in", env::temp_dir()))?;
    let first = dir.path().join("first");
    std::fs::write(&first, guests::patch_first_instructions(kernel))
        .map_err(Failure::file_error("write", &first))?;
    host.add_file_copy(&first, guests::FIRST_INSTRUCTION_KERNEL)?;
    host.add_guest_initrd("initrd", &Initrd::for_guest(&artifacts, KERNEL, guests::FIRST_PROGRAM_SCRIPT)?)?;
    let output = host.run(|line| eprintln!("{line}"), should_continue)?;
    let measurements: Vec<Measurement> = output
        .lines()
        .filter_map(|line| Measurement::parse_line(line.strip_prefix(MEASUREMENT_PREFIX)?))
        .collect();
    if measurements.len() != Vmm::ALL.len() * rounds as usize {
        return Err(Failure::UnexpectedReply { subject: "the emulated host".to_owned(), reply: output });
    }
    Ok(report(&measurements))
}

/// Measures all VMMs in turns. Prints each measurement when it is complete.
fn measure_on_this_machine(rounds: u32) -> Result<String, Failure> {
    for _ in 0..rounds {
        for vmm in Vmm::ALL {
            println!("{MEASUREMENT_PREFIX}{}", guests::measure(vmm)?.to_line());
        }
    }
    Ok(String::new())
}

fn report(measurements: &[Measurement]) -> String {
    let rounds_of = |vmm: Vmm, value: fn(&Measurement) -> f64| {
        let mut rounds = Rounds::default();
        measurements
            .iter()
            .filter(|measurement| measurement.vmm == vmm)
            .for_each(|measurement| rounds.add(value(measurement)));
        rounds
    };
    let row = |vmm: Vmm| {
        let cells = [
            rounds_of(vmm, Measurement::first_instruction_ms),
            rounds_of(vmm, Measurement::first_program_ms),
            rounds_of(vmm, Measurement::vmm_kib),
        ];
        [vmm.name().to_owned()].into_iter().chain(cells.map(|rounds| rounds.summary())).collect::<Vec<_>>()
    };
    let head = ["", "first instruction, ms", "first program, ms", "VMM memory, KiB"];
    let ratio_to_ours = |other: Vmm, value: fn(&Measurement) -> f64| {
        rounds_of(other, value).median() / rounds_of(Vmm::VmmPlugin, value).median()
    };
    let ratios = [
        format_ratio(
            "guest_first_instruction_vs_microvm",
            ratio_to_ours(Vmm::Microvm, Measurement::first_instruction_ms),
        ),
        format_ratio(
            "guest_first_program_vs_microvm",
            ratio_to_ours(Vmm::Microvm, Measurement::first_program_ms),
        ),
        format_ratio("guest_first_program_vs_pc", ratio_to_ours(Vmm::Pc, Measurement::first_program_ms)),
        format_ratio("vmm_memory_vs_microvm", ratio_to_ours(Vmm::Microvm, Measurement::vmm_kib)),
    ];
    format!("{}\n{}\n", format_table(&head, &Vmm::ALL.map(row)), ratios.join("\n"))
}
