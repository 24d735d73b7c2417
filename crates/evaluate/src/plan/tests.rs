//! Tests of `tarn plan` from options and files to results.

use std::{fs, io::Write as _, sync::OnceLock};

use clap::Parser;
use cli_runtime::Exit;
use tempfile::{NamedTempFile, TempDir};

use super::{spread::Spread, *};

const HEADER: &str = "vm_id,arrive_s,depart_s,cores,mem_gb,batch_id\n";
/// Two sockets with 4 cores and 8 GiB, samples every second.
const SMALL: &str =
    "--sockets 2 --cores-per-socket 4 --gib-per-core 2 --pool-sockets 2 --warm-up 0 --sample 1s";

#[derive(Debug, Parser)]
struct TestCommand {
    #[command(flatten)]
    args: Args,
}

fn args(path: &std::path::Path, options: &str) -> Args {
    let words = ["plan", path.to_str().unwrap()].into_iter().chain(options.split_whitespace());
    TestCommand::try_parse_from(words).unwrap().args
}

/// Creates the customers of a seed once: all tests have the same usage table, and its workloads are simulated for long.
fn cached_customers(
    args: &Args,
    usage: &[VmSample],
    has_stable_owners: bool,
    seed: u64,
) -> Result<Customers, Failure> {
    static CUSTOMERS: [OnceLock<Customers>; 2] = [const { OnceLock::new() }; 2];
    let create = || create_customers(args, usage, has_stable_owners, seed).unwrap();
    Ok(CUSTOMERS[usize::try_from(seed - 1).unwrap()].get_or_init(create).clone())
}

/// Writes a trace, and computes its plan.
fn plan_of(rows: &str, options: &str) -> Result<Plan, Failure> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.csv");
    fs::write(&path, format!("{HEADER}{rows}")).unwrap();
    compute(&args(&path, options), cached_customers)
}

fn message(result: Result<Plan, Failure>) -> String {
    let message = result.unwrap_err().message();
    message.split_once("trace.csv: ").map_or(message.clone(), |(_, rest)| rest.to_owned())
}

#[test]
fn fixed_share_is_computed_from_the_largest_pool_use() {
    // Both VMs run at the same time: 6 of 16 GiB, of which half is on the pool.
    let plan = plan_of("0,0,10,1,4,a\n1,5,9,4,2,b\n", &format!("{SMALL} --policy none,static=0.5")).unwrap();
    let rows: Vec<_> = plan
        .results
        .iter()
        .map(|row| (row.policy.to_string(), row.dram_required, row.gib_per_pool))
        .collect();
    let expected = [("none".to_owned(), 1.0, 0.0), ("static=0.5".to_owned(), 0.6875, 3.0)];
    assert_eq!(rows, expected);
    assert_eq!((plan.trace.vms, plan.trace.samples), (2, 11));
}

#[test]
fn order_of_rows_does_not_change_the_result() {
    let sorted = "1,0,10,2,4,a\n2,0,8,4,3,a\n10,1,,1,1,b\n3,7,9,4,4,c\n";
    let shuffled = "3,7,9,4,4,c\n10,1,,1,1,b\n2,0,8,4,3,a\n1,0,10,2,4,a\n";
    let json = |rows| serde_json::to_string(&plan_of(rows, SMALL).unwrap()).unwrap();
    assert_eq!(json(sorted), json(shuffled));
}

#[test]
fn invalid_traces_and_options_are_rejected() {
    let cases = [
        ("", "", "the trace has no rows: must have at least one VM"),
        ("0,9,3,1,1,a\n", "", "line 2: depart_s = \"3\": must not be before the arrival"),
        ("0,0,,5,1,a\n", "", "line 2: cores = \"5\": must be at most the cores of a socket"),
        (
            "0,0,,1,nan,a\n",
            "",
            "line 2: mem_gb = \"nan\": must be a number of GB that is at least 1 MiB and at most 64 TiB",
        ),
        ("0,0,,1,1,a\n0,1,,1,1,a\n", "", "line 3: vm_id = \"0\": must not be the id of an earlier row"),
        ("0,0,3,1,1,a\n", "--warm-up 1h", "--warm-up: \"3600s\" must be before the last event of the trace"),
        ("0,0,3,1,1,a\n", "--pool-sockets 3", "--pool-sockets: \"3\" must divide --sockets (2)"),
        (
            "0,0,3,1,1,a\n",
            "--placement as-traced",
            "the trace has no column `socket`: must have it for --placement as-traced",
        ),
    ];
    for (rows, options, expected) in cases {
        let base = SMALL.replace(if options.contains("--warm-up") { "--warm-up 0" } else { "\0" }, "");
        let base = base.replace(if options.contains("--pool") { "--pool-sockets 2" } else { "\0" }, "");
        assert_eq!(message(plan_of(rows, &format!("{base} {options}"))), expected);
    }
    let failure =
        plan_of("0,0,3,1,1,a\n", &SMALL.replace("--pool-sockets 2", "--pool-sockets 3")).unwrap_err();
    assert_eq!(failure.exit() as u8, Exit::Usage as u8);
}

#[test]
fn truncated_gzip_file_is_an_error_with_the_last_line() {
    let folder: TempDir = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.csv");
    let rows: String = (0..20_000).map(|vm| format!("{vm},{vm},,1,1,b{}\n", vm * 7919 % 10_007)).collect();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(format!("{HEADER}{rows}").as_bytes()).unwrap();
    let bytes = gzip.finish().unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let error = message(compute(&args(&path, SMALL), cached_customers));
    assert!(error.starts_with("cannot read after line ") && !error.contains("line 0"), "{error}");
}

#[test]
fn least_baseline_has_no_more_rejections() {
    // Both sockets are full of cores. Each needs only 3 of 8 GiB.
    let rows = "0,0,,4,3,a\n1,0,,4,3,a\n2,1,,4,3,a\n3,9,,1,1,a\n";
    let plan = plan_of(rows, &format!("{SMALL} --baseline least --policy none")).unwrap();
    assert_eq!((plan.trace.rejected, plan.baseline.gib_per_socket), (2, 3.0));
    let plan = plan_of(rows, &format!("{SMALL} --baseline socket-peak --policy none")).unwrap();
    assert_eq!((plan.trace.rejected, plan.baseline.gib_per_socket), (2, 3.0));
}

#[test]
fn slices_round_pool_memory_down_and_need_a_buffer() {
    // 3 GiB at a share of 0.5 are one slice of 1 GiB. The slice drains for 2 s after the VM has ended.
    let rows = "0,0,10,1,3,a\n1,11,20,1,3,a\n";
    let options = format!("{SMALL} --policy static=0.5 --slice 1GiB --offline-gib-per-s 0.5");
    let plan = plan_of(rows, &options).unwrap();
    let row = &plan.results[0];
    // 2 of 3 GiB stay local, so that a socket needs two thirds of its 8 GiB.
    assert!((row.local_gib_per_socket - 16.0 / 3.0).abs() < 1e-9, "{row:?}");
    assert_eq!((row.gib_per_pool, row.buffer_slices), (1.0, Some(1)));
    assert_eq!(row.slices.unwrap().slices_assigned, 2);
    let plan = plan_of(rows, &options.replace("1GiB", "256MiB")).unwrap();
    assert_eq!((plan.results[0].gib_per_pool, plan.results[0].slices.unwrap().slices_assigned), (1.5, 12));
}

#[test]
fn sparse_pool_has_emcs_as_large_as_their_largest_use() {
    // Sockets 0 to 3 are attached to the EMCs 0 and 1, 1 and 2, 2 and 3, and 3 and 0. The VM has 4 of 8 GiB
    // on the pool, all on one EMC.
    let rows = "0,0,10,1,8,a\n";
    let options = "--sockets 4 --cores-per-socket 4 --gib-per-core 2 --pool-sockets 4 --warm-up 0 --sample 1s \
                   --policy static=0.5 --slice 1GiB --emcs-per-host 2";
    let row = |options: &str| plan_of(rows, options).unwrap().results.swap_remove(0);
    assert_eq!(row(options).gib_per_pool, 4.0);
    let sparse = row(&format!("{options} --hosts-per-emc 2"));
    assert_eq!((sparse.gib_per_pool, sparse.slices.unwrap().lost_emc_gib_max), (16.0, 4.0));
    assert_eq!((sparse.dram_required, sparse.dram_required_at_event_peak), (1.0, 1.0));
    // All sockets reach all EMCs, as without the option.
    assert_eq!(row(&format!("{options} --hosts-per-emc 4")).gib_per_pool, 4.0);
    let error = message(plan_of(rows, &format!("{options} --hosts-per-emc 6")));
    assert_eq!(error, "--hosts-per-emc: \"6\" must be at most --pool-sockets (4)");
    let error = message(plan_of(rows, &format!("{options} --hosts-per-emc 3")));
    assert_eq!(
        error,
        "--hosts-per-emc: \"3\" must be a multiple of --emcs-per-host (2), and the quotient must divide \
         --pool-sockets (4)"
    );
}

#[test]
fn gzip_file_that_expands_to_one_line_is_an_error() {
    let folder: TempDir = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.csv");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gzip.write_all(HEADER.as_bytes()).unwrap();
    let zeros = vec![b'0'; 1 << 20];
    (0..64).for_each(|_| gzip.write_all(&zeros).unwrap());
    fs::write(&path, gzip.finish().unwrap()).unwrap();
    let error = message(compute(&args(&path, SMALL), cached_customers));
    assert!(error.contains("line 2 is longer than 1048576 bytes"), "{error}");
}

/// Writes a usage table of six customers, whose VMs touch 1 to 3 of 8 GiB.
fn usage_table() -> NamedTempFile {
    let rows: String = (0..60)
        .map(|vm| format!("{},{},8,{},v{vm},c{}\n", vm * 100, vm * 100 + 90, vm % 3 + 1, vm % 6))
        .collect();
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(format!("began_s,ended_s,requested_gib,peak_gib,vm,key\n{rows}").as_bytes()).unwrap();
    file
}

/// Four sockets with 8 cores and 32 GiB.
const MEDIUM: &str = "--sockets 4 --cores-per-socket 8 --gib-per-core 4 --pool-sockets 4 --warm-up 1h";

/// Rows of a trace for [`MEDIUM`]: VMs with 2 cores and 5 or 6 GiB that run for 15 minutes. First one arrives every
/// two minutes, and later, when predictions are possible, one per minute. Each fourth socket is that of the trace.
fn medium_trace() -> String {
    let row = |vm: u32| {
        let arrive = if vm < 1200 { 120 * vm } else { 72_000 + 60 * vm };
        let gib = if vm.is_multiple_of(3) { 5 } else { 6 };
        format!("{vm},{arrive},{},2,{gib},b{},{}\n", arrive + 900, vm / 7, vm % 4)
    };
    (0..3000).map(row).collect()
}

fn medium_plan(options: &str) -> Result<Plan, Failure> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.csv");
    fs::write(&path, format!("{},socket\n{}", HEADER.trim_end(), medium_trace())).unwrap();
    compute(&args(&path, &format!("{MEDIUM} {options}")), cached_customers)
}

#[test]
fn predictions_save_memory_and_reject_no_more_vms() {
    let usage = usage_table();
    let options = format!("--policy none,static=0.9,frigid,full --usage csv={}", usage.path().display());
    let plan = medium_plan(&options).unwrap();
    let [none, fixed, frigid, full] = &plan.results[..] else { panic!("{:?}", plan.results) };
    assert_eq!((none.dram_required, none.gib_per_pool, none.mispredicted), (1.0, 0.0, Some(0.0)));
    for row in [frigid, full] {
        // Four VMs per socket need at most 24 of 32 GiB without a pool.
        assert!(row.gib_per_pool > 0.0 && row.dram_required < 0.75, "{row:?}");
        assert!(row.local_fraction < 0.75 && row.rejected <= none.rejected, "{row:?}");
        assert!(row.mispredicted.unwrap() < 0.02, "{row:?}");
    }
    assert!(fixed.mispredicted.unwrap() > 0.1, "all VMs touch more than a tenth of their memory: {fixed:?}");
}

#[test]
fn each_local_fraction_has_a_row() {
    let usage = usage_table();
    let usage = usage.path().display();
    let options = format!("--policy frigid --usage csv={usage} --local-fraction 0.7,1 --placement as-traced");
    let plan = medium_plan(&options).unwrap();
    let [less, whole] = &plan.results[..] else { panic!("{:?}", plan.results) };
    assert_eq!((less.local_fraction, whole.local_fraction), (22938.0 / 32768.0, 1.0));
    assert!(less.gib_per_pool > 0.0, "{less:?}");
    assert_eq!((whole.gib_per_pool, whole.rejected), (0.0, 0.0));
}

#[test]
fn figures_have_a_line_for_each_policy() {
    let folder: TempDir = tempfile::tempdir().unwrap();
    let plan = plan_of("0,0,10,1,4,a\n", &format!("{SMALL} --policy none,static=0.5")).unwrap();
    figures::write_all(folder.path(), &plan).unwrap();
    for name in ["plan-required.svg", "plan-saved.svg"] {
        let svg = fs::read_to_string(folder.path().join(name)).unwrap();
        assert!(svg.contains("no pool") && svg.contains("50 % of each VM"), "{name}: {svg}");
    }
}

#[test]
fn options_without_effect_are_rejected() {
    let rows = "0,0,3,1,1,a\n";
    let cases = [
        ("--policy frigid", "--policy frigid and full: require --usage, to model the touched memory"),
        (
            "--slice none --emcs-per-host 2",
            "--emcs-per-host, --hosts-per-emc and --offline-gib-per-s: require --slice with a size",
        ),
        ("--local-fraction 0.5", "--local-fraction: requires --policy frigid or full"),
        ("--policy none,static=0.5,none", "--policy: \"none\" must not be repeated"),
    ];
    for (options, expected) in cases {
        assert_eq!(message(plan_of(rows, &format!("{SMALL} {options}"))), expected);
    }
    let usage = usage_table();
    let usage = usage.path().display();
    let as_traced = medium_plan(&format!("--policy full --usage csv={usage} --placement as-traced"));
    assert_eq!(
        message(as_traced),
        "--placement as-traced: requires --local-fraction with --policy frigid and full"
    );
    for option in ["--seed 2", "--pdm 4", "--exceed-max 1", "--emcs-per-host 2", "--offline-gib-per-s 2"] {
        let words = format!("plan trace.csv {SMALL} {option}");
        let error = TestCommand::try_parse_from(words.split_whitespace()).unwrap_err();
        assert_eq!(error.kind(), clap::error::ErrorKind::MissingRequiredArgument, "{option}");
    }
}

#[test]
fn trace_that_is_read_twice_must_be_a_file() {
    let options = format!("{SMALL} --slice 1GiB");
    let error = message(compute(&args(std::path::Path::new("/dev/null"), &options), cached_customers));
    assert!(error.starts_with("TRACE: \"/dev/null\" must be a regular file"), "{error}");
}

#[test]
fn baseline_of_the_socket_peak_rejects_no_more_vms() {
    // The first VM is larger than all VMs of samples.
    let rows = "0,0,5,1,8,a\n1,1,20,1,2,b\n";
    let options = SMALL.replace("--warm-up 0", "--warm-up 6s");
    let plan = plan_of(rows, &format!("{options} --baseline socket-peak --policy none")).unwrap();
    assert_eq!((plan.baseline.gib_per_socket, plan.trace.rejected), (8.0, 0));
}

#[test]
fn slices_need_at_least_the_local_memory_of_an_exact_share() {
    // The fullest socket uses 6 of 8 GiB.
    let rows = "0,0,10,4,6,a\n1,0,10,1,3,a\n";
    let row = |slice: &str, share: &str| {
        let options = format!("{SMALL} --policy static={share} --slice {slice}");
        plan_of(rows, &options).unwrap().results.swap_remove(0)
    };
    for share in ["0", "0.000001", "0.1", "0.3", "0.5", "1"] {
        let (exact, slices) = (row("none", share), row("1GiB", share));
        assert!(slices.local_gib_per_socket >= exact.local_gib_per_socket - 1e-9, "{exact:?} {slices:?}");
    }
    // No VM has a slice.
    assert_eq!((row("1GiB", "0.000001").dram_required, row("1GiB", "0.1").dram_required), (1.0, 1.0));
}

#[test]
fn larger_use_between_samples_counts_as_event_peak() {
    let rows = "0,0,100,1,2,a\n1,1,2,1,6,a\n";
    let options = SMALL.replace("--sample 1s", "--sample 50s");
    let plan = plan_of(rows, &format!("{options} --policy static=0.5 --slice 1GiB")).unwrap();
    let row = &plan.results[0];
    // At 1 s, half of 8 GiB is local, on the same socket, and as much of 16 GiB is on the pool.
    assert_eq!((row.local_gib_per_socket, row.dram_required_at_event_peak), (4.0, 0.75));
    assert!(row.dram_required < 0.75);
}

#[test]
fn event_peaks_need_at_least_the_memory_of_samples() {
    // At the event peak, a larger part of the memory of the fullest socket is on a pool than in samples.
    let rows = "0,0,100,1,1,a\n1,1,2,1,7,a\n";
    for interval in ["1s", "50s"] {
        for share in ["0.1", "0.5", "0.9"] {
            let options = SMALL.replace("--sample 1s", &format!("--sample {interval}"));
            let plan = plan_of(rows, &format!("{options} --policy static={share} --slice 1GiB")).unwrap();
            let row = &plan.results[0];
            assert!(row.dram_required_at_event_peak >= row.dram_required, "{row:?}");
        }
    }
}

#[test]
fn misleading_inputs_have_notes() {
    let notes = |rows: &str, options: &str| plan_of(rows, &format!("{SMALL} {options}")).unwrap().notes;
    let (half, full) = ("0,0,200,1,4,a\n", "0,0,200,1,8,a\n");
    let surplus = "at most 50 % of the memory of a socket are in use without pools. Savings contain the rest: \
                   consider --baseline least";
    assert_eq!(notes(half, "--policy static=0.5"), [surplus]);
    assert_eq!(notes(half, "--policy none"), [""; 0]);
    assert_eq!(notes(half, "--policy static=0.5 --baseline least"), [""; 0]);
    assert_eq!(notes(full, "--policy static=0.5"), [""; 0]);
    let options = SMALL.replace("--warm-up 0", "--warm-up 1d");
    let late = plan_of("0,100000,100200,1,8,a\n", &format!("{options} --policy static=0.5")).unwrap();
    assert_eq!(late.notes, ["the first VM arrives after --warm-up: samples count an empty cluster"]);
    let few = notes("0,0,20,1,8,a\n", "--policy static=0.5");
    assert_eq!(few, ["there are few samples: compare REQUIRED with EVENT PEAK (-o wide)"]);
}

#[test]
fn starts_beyond_the_limits_of_the_ledger_are_an_error() {
    let rows = "0,0,10,1,16,a\n1,0,10,1,16,a\n";
    let options = SMALL.replace("--gib-per-core 2", "--gib-per-core 4");
    let error = message(plan_of(rows, &format!("{options} --policy static=1 --slice 1MiB")));
    assert!(error.contains("must be larger") && error.contains("rejects 1 start"), "{error}");
}

#[test]
fn stranded_memory_is_that_of_the_policy() {
    // Socket 0 has no free cores, and 5 of 8 GiB are free.
    let rows = "0,0,10,4,3,a\n";
    let stranded =
        |policy: &str| plan_of(rows, &format!("{SMALL} --policy {policy}")).unwrap().results[0].stranded_mean;
    let samples = 11.0;
    let all_local = 5.0 / 16.0 * 10.0 / samples;
    let is_near = |one: f64, other: f64| (one - other).abs() < 1e-9;
    assert!(is_near(stranded("none"), all_local), "{}", stranded("none"));
    assert!(is_near(stranded("static=0.5"), all_local / 2.0));
    assert!(is_near(stranded("static=1"), 0.0));
    // 1 of 3 GiB is on the pool, and 2 of 16 / 3 GiB of the socket are in use.
    let with_slices = (16.0 / 3.0 - 2.0) / 16.0 * 10.0 / samples;
    assert!(is_near(stranded("static=0.5 --slice 1GiB"), with_slices));
}

#[test]
fn each_seed_has_rows_and_the_spread_is_over_all() {
    let usage = usage_table();
    let rows: String = (0..40).map(|vm| format!("{vm},{vm},{},1,1,b{}\n", vm + 5, vm % 9)).collect();
    let options =
        format!("{SMALL} --policy none,static=0.5 --usage csv={} --seed 1,2", usage.path().display());
    let plan = plan_of(&rows, &options).unwrap();
    let seeds: Vec<_> = plan.results.iter().map(|row| row.seed).collect();
    assert_eq!(seeds, [1, 1, 2, 2].map(Some));
    let mispredicted: Vec<f64> = plan.results.iter().filter_map(|row| row.mispredicted).collect();
    let shares = [mispredicted[1], mispredicted[3]];
    let expected = Spread {
        mean: shares.iter().sum::<f64>() / 2.0,
        min: shares.into_iter().fold(1.0, f64::min),
        max: shares.into_iter().fold(0.0, f64::max),
    };
    assert_eq!(plan.spread[1].mispredicted, Some(expected));
    let saved = plan.results[1].dram_saved;
    assert_eq!(plan.spread[1].dram_saved, Spread { mean: saved, min: saved, max: saved });
}

#[test]
fn csv_has_a_header_and_empty_cells() {
    let plan = plan_of("0,0,10,1,4,a\n", &format!("{SMALL} --policy static=0.5")).unwrap();
    let csv = plan.csv().unwrap();
    let (head, row) = csv.trim_end().split_once('\n').unwrap();
    let start = "policy,pool_sockets,dram_required,dram_saved,rejected,stranded_mean,mispredicted,migrations,buffer_slices,";
    assert!(head.starts_with(start), "{head}");
    assert!(row.starts_with("static=0.5,2,0.625,0.375,0.0,0.0,,,,"), "{row}");
}

#[test]
fn cost_is_added_if_prices_are_given() {
    let options = format!("{SMALL} --policy static=0.5 --dram-usd-per-gib 4 --cxl-usd-per-gib 2");
    let plan = plan_of("0,0,10,1,4,a\n", &options).unwrap();
    // 8 GiB of local memory and 2 GiB on the pool, instead of 16 GiB.
    assert_eq!((plan.baseline.cost_usd, plan.results[0].cost_usd), (Some(64.0), Some(36.0)));
}
