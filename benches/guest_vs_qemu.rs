//! The promise: from exec to a guest's first instruction QEMU's `microvm` takes at least 3 times as long as our VMM, to its
//! first program 1.3 times, and QEMU's `pc` no less than ours; and either needs 5 times the memory for itself. All on one
//! emulated host with nested paging and one processor, the same kernel, initrd and sizes, in turns; programs run slowly there
//! beside what the host's KVM does. Inside the host this very program measures.

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
    guests::{self, Measured, Vmm},
    programs::vmm_plugin,
    report::{Rounds, ratio, table, tell},
};
use clap::Parser;
use emulated_host::{Artifacts, Host, Initrd};

/// The kernel of hosts and guests.
const KERNEL: &str = "6.12";
/// How the line with a measurement begins.
const MEASURED: &str = "MEASURED ";

/// Time until a guest runs, and cost of its VMM
#[derive(Debug, Parser)]
struct Args {
    /// How often each VMM boots; the report shows medians
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=15))]
    rounds: u32,
    /// Measure inside an emulated host
    #[arg(long, hide = true)]
    inside: bool,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    if args.inside {
        return tell("guest_vs_qemu", async { inside(args.rounds) }).await;
    }
    let wanted = Dropped::default();
    let is_wanted = wanted.watched();
    let measure = tokio::task::spawn_blocking(move || outside(args.rounds, is_wanted));
    tell("guest_vs_qemu", async move {
        let _wanted = wanted; // until this is dropped
        measure.await.expect("it does not panic")
    })
    .await
}

/// Notifies a thread that no receiver is left.
#[derive(Default)]
struct Dropped(Arc<AtomicBool>);

impl Dropped {
    fn watched(&self) -> impl Fn() -> bool + Send + 'static {
        let dropped = Arc::clone(&self.0);
        move || !dropped.load(Ordering::Relaxed)
    }
}

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Boots a host, lets it measure, and compares.
fn outside(rounds: u32, is_wanted: impl Fn() -> bool) -> Result<String, Failure> {
    let bed = Artifacts::locate()?;
    let own = env::current_exe().map_err(Failure::file("find", "/proc/self/exe"))?;
    let script = format!("guest_vs_qemu --inside --rounds {rounds} 2>&1");
    let host = Host::new(&bed, &script)?;
    host.program(&vmm_plugin()?)?;
    host.program_as(&own, "guest_vs_qemu")?;
    host.qemu()?;
    let kernel = std::fs::read(bed.kernel(KERNEL)).map_err(Failure::file("read", bed.kernel(KERNEL)))?;
    let dir = tempfile::tempdir().map_err(Failure::file("make a folder in", env::temp_dir()))?;
    let first = dir.path().join("first");
    std::fs::write(&first, guests::says_its_first_instruction(kernel))
        .map_err(Failure::file("write", &first))?;
    host.copy(&first, guests::FIRST_INSTRUCTION)?;
    host.guest("initrd", &Initrd::for_guest(&bed, KERNEL, guests::FIRST_PROGRAM)?)?;
    let said = host.run(|line| eprintln!("{line}"), is_wanted)?;
    let measured: Vec<Measured> =
        said.lines().filter_map(|line| Measured::read(line.strip_prefix(MEASURED)?)).collect();
    if measured.len() != Vmm::ALL.len() * rounds as usize {
        return Err(Failure::Answer { what: "the emulated host".to_owned(), answer: said });
    }
    Ok(report(&measured))
}

/// Measures all VMMs in turns and prints each result at once.
fn inside(rounds: u32) -> Result<String, Failure> {
    for _ in 0..rounds {
        for vmm in Vmm::ALL {
            println!("{MEASURED}{}", guests::measure(vmm)?.write());
        }
    }
    Ok(String::new())
}

fn report(measured: &[Measured]) -> String {
    let of = |vmm: Vmm, what: fn(&Measured) -> f64| {
        let mut rounds = Rounds::default();
        measured
            .iter()
            .filter(|measured| measured.vmm == vmm)
            .for_each(|measured| rounds.add(what(measured)));
        rounds
    };
    let row = |vmm: Vmm| {
        let cells = [
            of(vmm, Measured::first_instruction_ms),
            of(vmm, Measured::first_program_ms),
            of(vmm, Measured::own_kib),
        ];
        [vmm.name().to_owned()].into_iter().chain(cells.map(|rounds| rounds.show())).collect::<Vec<_>>()
    };
    let head = ["", "first instruction, ms", "first program, ms", "own memory, KiB"];
    let over =
        |other: Vmm, what: fn(&Measured) -> f64| of(other, what).median() / of(Vmm::Ours, what).median();
    let ratios = [
        ratio("guest_first_instruction_vs_microvm", over(Vmm::Microvm, Measured::first_instruction_ms)),
        ratio("guest_first_program_vs_microvm", over(Vmm::Microvm, Measured::first_program_ms)),
        ratio("guest_first_program_vs_pc", over(Vmm::Pc, Measured::first_program_ms)),
        ratio("vmm_memory_vs_microvm", over(Vmm::Microvm, Measured::own_kib)),
    ];
    format!("{}\n{}\n", table(&head, &Vmm::ALL.map(row)), ratios.join("\n"))
}
