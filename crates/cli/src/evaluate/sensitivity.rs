//! `tarn evaluate sensitivity`: how many workloads each way to tell would place on the pool. Workloads are an operator's own, or MODELLED:
//! programs on a simulated core, with counters and slowdowns as the model makes them; that is said whenever they are used.

use std::{io, path::PathBuf};

use clap::Args;
use prediction::sensitivity::{
    COUNTERS, Workload, read as read_labels,
    trial::{self, Placed, Verdict},
};
use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;
use sim::processor::{self, Measured, Memory, SERVER, family, measure, noisy, read_latency, read_trace};
use units::{Fraction, limits::SPLITS_MAX};

use super::{RATES, percent};
use crate::{
    Failure, Format, open, print,
    table::{Column, Row, col},
};

/// Workloads, and what is asked of them.
#[derive(Clone, Debug, Args)]
pub struct Sensitivity {
    /// Labelled workloads of your own: program, slowdown (0.1 is a tenth longer) and a column for each counter; else modelled ones
    #[arg(long, value_name = "FILE")]
    labels: Option<PathBuf>,
    /// Loaded latencies of servers `ddr5` and `cxl`, as measured, for modelled workloads; else made ones
    #[arg(long, value_name = "FILE", conflicts_with = "labels")]
    latency: Option<PathBuf>,
    /// A trace of memory or keys that is one more modelled workload; may be repeated
    #[arg(long, value_name = "FILE", conflicts_with = "labels")]
    trace: Vec<PathBuf>,
    /// How much slower a workload may be, in percent: the performance degradation margin
    #[arg(long, value_name = "PERCENT", default_value = "5", value_parser = margin)]
    pdm: Fraction,
    /// Times that programs are parted into two halves by chance
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=i64::from(SPLITS_MAX)))]
    splits: u32,
}

/// Inputs of each program of the family.
const INPUTS: u64 = 3;
/// Local memory and pool memory as they are made: idle latency in ns, and a core's share of the bandwidth in GB/s.
const LOCAL: (f64, f64) = (100.0, 8.0);
const POOL: (f64, f64) = (250.0, 6.0);
const SEED: u64 = 1;

fn margin(text: &str) -> Result<Fraction, String> {
    let percent: Option<f64> = text.parse().ok().filter(|percent| (0.1..=100.0).contains(percent));
    let margin = percent.and_then(|percent| Fraction::new(percent / 100.0).ok());
    margin.ok_or_else(|| "must be a number of percent from 0.1 to 100".to_owned())
}

/// Evaluates and prints.
///
/// # Errors
/// A file cannot be read, or nothing can be told of its workloads.
pub(super) fn run(args: &Sensitivity, format: Format) -> Result<(), Failure> {
    let workloads = match &args.labels {
        Some(path) => open::read(path, read_labels)?,
        None => modelled(args, format)?,
    };
    let rates = RATES.map(|rate| Fraction::new(rate).expect("a rate is a share"));
    let told = trial::run(&workloads, args.pdm, &rates, args.splits, SEED);
    let told = told.map_err(|untold| Failure::File {
        tried: "tell slowdowns of",
        path: args.labels.clone().unwrap_or_else(|| "the modelled workloads".into()),
        errno: io::Error::new(io::ErrorKind::InvalidData, untold),
    })?;
    let slowed = workloads.iter().filter(|workload| workload.slowdown > args.pdm.get()).count();
    print::note(
        format,
        &format!(
            "{} runs of workloads, {slowed} of them slowed down by more than {}",
            workloads.len(),
            percent(args.pdm.get())
        ),
    );
    print::list(format, &told)
}

/// What the model makes: programs of its family, and those out of traces.
fn modelled(args: &Sensitivity, format: Format) -> Result<Vec<Workload>, Failure> {
    print::note(
        format,
        "these workloads, their counters and their slowdowns are MODELLED; --labels takes measured ones",
    );
    let [local, pool] = match &args.latency {
        Some(path) => {
            let server = |name: &str| open::read(path, |bytes| read_latency(bytes, name));
            [server("ddr5")?, server("cxl")?]
        }
        None => [LOCAL, POOL].map(|(idle_ns, gb_per_s)| Memory::made(idle_ns, gb_per_s)),
    };
    let mut rng = Pcg64Mcg::seed_from_u64(SEED);
    let mut workloads = Vec::new();
    let mut run = |program: &str, what: &processor::Program| {
        let Measured { counters, slowdown } = measure(&SERVER, what, &local, &pool);
        let counters = by_name(&noisy(&counters, &mut rng));
        workloads.push(Workload { program: program.to_owned(), counters, slowdown });
    };
    for kernel in family() {
        (0..INPUTS).for_each(|input| run(&kernel.name, &kernel.program(input)));
    }
    for path in &args.trace {
        for (added, programs) in open::read(path, read_trace)? {
            let name = format!("{}{added}", path.display());
            programs.iter().for_each(|program| run(&name, program));
        }
    }
    Ok(workloads)
}

/// What the model calls its counters, as the forest knows them.
fn by_name(counters: &processor::Counters) -> [f64; COUNTERS.len()] {
    COUNTERS.map(|name| {
        let at = processor::COUNTERS.iter().position(|other| *other == name);
        at.map_or(f64::NAN, |at| counters[at])
    })
}

impl Row for Verdict {
    const COLUMNS: &'static [Column<Self>] = &[
        col("FALSE, ASKED", |v| percent(v.fp_asked)),
        col("FOREST PLACES", |v| placed(&v.forest)),
        col("DRAM BOUND", |v| placed(&v.dram_bound)),
        col("MEMORY BOUND", |v| placed(&v.memory_bound)),
        col("FOREST, TUNED BEFORE", |v| tuned(&v.forest)),
    ];
}

fn placed(placed: &Placed) -> String {
    let Placed { placed, placed_p1, placed_p99, .. } = *placed;
    format!("{} ({} to {})", percent(placed), percent(placed_p1), percent(placed_p99))
}

fn tuned(placed: &Placed) -> String {
    format!("{}, {} false", percent(placed.tuned_placed), percent(placed.tuned_fp))
}
