//! Tests of reading tables: each layout, and the error for each kind of invalid input.

use units::{Bytes, Fraction, UnixMs};

use super::*;
use crate::frigid::backtest::{self, Evaluation};

const CUSTOM_HEADER: &str =
    "began_s,ended_s,requested_gib,peak_gib,vm,key,kind,place,cores,p99_gib,mean_gib,busy_percent,suspect";

fn read_custom(text: &str) -> Result<Vec<VmSample>, TableError> {
    read(text.as_bytes(), Layout::Custom)
}

fn error_of(row: &str) -> String {
    read_custom(&format!("{CUSTOM_HEADER}\n{row}\n")).unwrap_err().to_string()
}

#[test]
fn custom_table_with_only_the_required_columns_is_read() {
    let row = &read_custom("peak_gib,requested_gib,began_s,ended_s\n3,8,1.5,60\n").unwrap()[0];
    assert_eq!(row.request.requested, Bytes::gib(8));
    assert_eq!((row.request.begins, row.outcome.ended), (UnixMs(1500), UnixMs(60_000)));
    assert_eq!(row.outcome.untouched.get(), 0.625);
    assert!(row.is_trusted && row.request.cores.is_none() && row.request.groups.owner().is_none());
}

#[test]
fn line_number_in_error_is_correct_for_all_line_breaks() {
    // Regression test: line numbers were one too low with `\r\n`.
    for (newline, end) in [("\n", ""), ("\r\n", ""), ("\r", ""), ("\r\n", "\r\n")] {
        let text = ["peak_gib,requested_gib,began_s,ended_s", "3,8,60,60", "3,8,60,60", "3,x,60,60"];
        let table = text.join(newline) + end;
        // With one byte per read, `\r\n` is split across reads.
        for bytes in [1, 7, 1 << 16] {
            let input = io::BufReader::with_capacity(bytes, table.as_bytes());
            let error = read(ShortReads(input), Layout::Custom).unwrap_err().to_string();
            assert!(error.starts_with("line 4: requested_gib = \"x\""), "{newline:?}: {error}");
        }
        let short = text[..3].join(newline) + newline + "3,8";
        let error = read_custom(&short).unwrap_err().to_string();
        assert!(error.starts_with("line 4: 2 values"), "{newline:?}: {error}");
    }
}

/// Reader that returns at most the content of its buffer from each read.
struct ShortReads<R>(R);

impl<R: io::BufRead> io::Read for ShortReads<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let buffer = self.0.fill_buf()?;
        let read = buffer.len().min(bytes.len());
        bytes[..read].copy_from_slice(&buffer[..read]);
        self.0.consume(read);
        Ok(read)
    }
}

#[test]
fn vm_that_ends_at_its_start_is_accepted() {
    assert_eq!(read_custom("peak_gib,requested_gib,began_s,ended_s\n3,8,60,60\n").unwrap().len(), 1);
}

#[test]
fn optional_columns_of_a_custom_table_are_read() {
    let row =
        &read_custom(&format!("{CUSTOM_HEADER}\n0,60,8,12,v,k,large,eu linux,4,2,1,30.5,1\n")).unwrap()[0];
    assert_eq!(row.request.groups.all(), ["v", "k", "large", "eu linux"]);
    assert_eq!(row.request.cores, Some(4.0));
    assert_eq!(row.outcome.untouched.get(), 0.0, "the VM touched more than it requested");
    assert_eq!((row.outcome.usage.p99, row.outcome.usage.mean), (Some(Bytes::gib(2)), Some(Bytes::gib(1))));
    assert_eq!(row.outcome.usage.busy_percent, Some(30.5));
    assert!(!row.is_trusted);
}

#[test]
fn invalid_value_error_names_line_column_value_and_rule() {
    let cases = [
        ("x,60,8,1,,,,,,,,,", "line 2: began_s = \"x\": must be a number of seconds from 0 to 100 years"),
        ("-1,60,8,1,,,,,,,,,", "line 2: began_s = \"-1\": must be a number of seconds"),
        ("1e99,60,8,1,,,,,,,,,", "line 2: began_s = \"1e99\": must be a number of seconds"),
        ("0,NaN,8,1,,,,,,,,,", "line 2: ended_s = \"NaN\": must be a number of seconds"),
        ("9,8,8,1,,,,,,,,,", "line 2: ended_s = \"8\": must not be before the start of the VM"),
        ("0,1,0,1,,,,,,,,,", "line 2: requested_gib = \"0\": must be a number above 0"),
        ("0,1,nan,1,,,,,,,,,", "line 2: requested_gib = \"nan\": must be a number above 0"),
        ("0,1,inf,1,,,,,,,,,", "line 2: requested_gib = \"inf\": must be a number above 0"),
        ("0,1,99999999,1,,,,,,,,,", "line 2: requested_gib = \"99999999\": must be a number above 0"),
        ("0,1,8,,,,,,,,,,", "line 2: peak_gib = \"\": must be a number from 0"),
        ("0,1,8,-2,,,,,,,,,", "line 2: peak_gib = \"-2\": must be a number from 0"),
        ("0,1,8,1,,,,,-1,,,,", "line 2: cores = \"-1\": must be a number from 0 to 4096"),
        ("0,1,8,1,,,,,,,x,,", "line 2: mean_gib = \"x\": must be a number from 0"),
        ("0,1,8,1,,,,,,,,,maybe", "line 2: suspect = \"maybe\": must be 0 or 1"),
        ("0,1,8", "line 2: 3 values: must be 13, as in the header line"),
    ];
    for (row, expected) in cases {
        let result = error_of(row);
        assert!(result.starts_with(expected), "{result}");
    }
}

#[test]
fn unclosed_quote_is_rejected() {
    let rows = "began_s,ended_s,requested_gib,peak_gib,vm\n0,1,8,1,\"a\n0,1,8,1,b\n0,1,8,1,c\"\n0,1,8,1,d\n";
    for text in [rows, &rows[..rows.len() - 14]] {
        assert_eq!(
            read_custom(text).unwrap_err().to_string(),
            "line 2: a value contains a line break: a quote may be unclosed"
        );
    }
}

#[test]
fn missing_or_unknown_column_is_named_in_error() {
    let error_at = |text: &str| read_custom(text).unwrap_err().to_string();
    assert_eq!(error_at(""), "missing column \"began_s\": must be in the header line");
    assert!(error_at("began_s,ended_s,requested_gib\n").starts_with("missing column \"peak_gib\""));
    assert!(
        error_at(&format!("{CUSTOM_HEADER},peak_gb\n"))
            .starts_with("unknown column \"peak_gb\": must be one of began_s, ended_s")
    );
    assert_eq!(
        error_at(&format!("{CUSTOM_HEADER}\n")),
        "the table has no rows: must have a header line and at least one row"
    );
    assert_eq!(
        read(&b"a\xff,b\n1,2\n"[..], Layout::Custom).unwrap_err().to_string(),
        "line 1: must be UTF-8"
    );
    let other = read("vm,week\n1,2\n".as_bytes(), Layout::BitbrainsWeek).unwrap_err().to_string();
    assert!(other.starts_with("missing column \"cores\""));
}

#[test]
fn bitbrains_week_ends_before_the_next_week_starts() {
    let header = "vm,week,cores,mem_cap_kb,mem_p99_kb,mem_mean_kb,cpu_mean_pct,untouched_frac,suspect,more";
    let text = format!(
        "{header}\n7,0,2,8388608,1,1,5,0.25,0,x\n7,1,2,8388608,1,1,5,-0.01,1,x\n8,1,2,0,0,0,0,,1,x\n"
    );
    let rows = read(text.as_bytes(), Layout::BitbrainsWeek).unwrap();
    let [first, second] = &rows[..] else { panic!("the week without memory must be skipped: {rows:?}") };
    assert!(first.outcome.ended < second.request.begins);
    assert_eq!(first.request.groups.all(), ["7", "", "2 cores, 8GiB", ""]);
    assert_eq!([first.outcome.untouched.get(), second.outcome.untouched.get()], [0.25, 0.0]);
    assert_eq!([first.is_trusted, second.is_trusted], [true, false]);
}

#[test]
fn nfcore_task_has_groups_by_process_and_sample() {
    let header =
        "workflow,process,sample_tag,cpus,attempt,start_ms,complete_ms,mem_requested_bytes,untouched_frac";
    let text = format!("{header}\nchipseq,SORT,a.bam,4,1,100,200,1073741824,0.5\n");
    let row = &read(text.as_bytes(), Layout::NfcoreTasks).unwrap()[0];
    assert_eq!(row.request.groups.all(), ["SORT a.bam", "SORT attempt 1", "chipseq SORT", "chipseq"]);
    assert_eq!((row.request.begins, row.outcome.ended), (UnixMs(100), UnixMs(200)));
    assert_eq!(row.request.requested, Bytes::gib(1));
    let error = read(text.replace("100,200", "500,200").as_bytes(), Layout::NfcoreTasks).unwrap_err();
    assert_eq!(error.to_string(), "line 2: complete_ms = \"200\": must not be before the start of the VM");
}

/// Evaluates the predictions on public data, if the data is present; it is not part of this
/// repository. It prints the numbers in docs/prediction.md.
fn check_public_trace(
    name: &str,
    file: &str,
    layout: Layout,
    evaluate: impl Fn(&[VmSample], &[Fraction]) -> Vec<Evaluation>,
) {
    let Some(samples) = read_public_trace(file, layout) else { return };
    let rates = [0.01, 0.02, 0.04, 0.1].map(|rate| Fraction::new(rate).unwrap());
    print_and_check(name, &evaluate(&samples, &rates));
}

const WEEKS_FILE: &str = "vm-memory/bitbrains-rnd/vm_week.csv.gz";
const TASKS_FILE: &str = "task-memory/nfcore-sizey/tasks.csv.gz";

fn evaluate_over_time(samples: &[VmSample], rates: &[Fraction]) -> Vec<Evaluation> {
    backtest::run(&[], samples, rates).unwrap()
}

fn evaluate_over_owners(samples: &[VmSample], rates: &[Fraction]) -> Vec<Evaluation> {
    backtest::cross_validate(samples, 4, rates).unwrap()
}

#[test]
fn public_traces_meet_the_target_rates_in_weeks_over_time() {
    check_public_trace("weeks, over time", WEEKS_FILE, Layout::BitbrainsWeek, evaluate_over_time);
}

#[test]
fn public_traces_meet_the_target_rates_in_weeks_over_owners() {
    check_public_trace("weeks, over owners", WEEKS_FILE, Layout::BitbrainsWeek, evaluate_over_owners);
}

#[test]
fn public_traces_meet_the_target_rates_in_tasks_over_time() {
    check_public_trace("tasks, over time", TASKS_FILE, Layout::NfcoreTasks, evaluate_over_time);
}

#[test]
fn public_traces_meet_the_target_rates_in_tasks_over_owners() {
    check_public_trace("tasks, over owners", TASKS_FILE, Layout::NfcoreTasks, evaluate_over_owners);
}

/// Prints evaluations, and checks the overpredictions of all VMs and of each size class. Also checks
/// that more memory is predicted than with the simple rule, at target rates of 1 and 2 %.
fn print_and_check(name: &str, evaluations: &[Evaluation]) {
    let percent = |share: f64| format!("{:.1}", 100.0 * share);
    for evaluation in evaluations {
        let Evaluation { result, rule, by_size, by_owner, .. } = evaluation;
        let excess = |rate: f64| rate - result.rate_target;
        assert!(excess(result.rate_actual) <= 0.005, "{name}: {result:?}");
        assert!(by_size.iter().all(|class| excess(class.rate) <= 0.01), "{name}: {by_size:?}");
        assert!(result.rate_target > 0.02 || result.frigid_share > rule.share, "{name}: {evaluation:?}");
        let by_size: Vec<String> =
            by_size.iter().map(|class| format!("{}: {}", class.smallest, percent(class.rate))).collect();
        println!(
            "{name}: target {} %: overpredicted {} ± {} % ({}), predicted memory {} %; simple rule {} % of \
             memory at {} %, in hindsight {} %; fixed share {} % at {} %; {} VMs, {} without forecast with {} % \
             of memory; {} of {} owners above the target",
            percent(result.rate_target),
            percent(result.rate_actual),
            percent(evaluation.rate_margin),
            by_size.join(", "),
            percent(result.frigid_share),
            percent(rule.share),
            percent(rule.rate),
            percent(rule.share_in_hindsight),
            percent(result.static_share),
            percent(result.static_rate),
            result.vms,
            result.vms_without_forecast,
            percent(evaluation.memory_without_forecast),
            by_owner.above_target,
            by_owner.owners,
        );
    }
}

/// Reads a compressed table in the folder of public data, or returns `None` if it is missing.
fn read_public_trace(name: &str, layout: Layout) -> Option<Vec<VmSample>> {
    let folder = std::env::var_os("TARN_DATA").map_or_else(
        || std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data")),
        std::path::PathBuf::from,
    );
    let path = folder.join(name);
    let Ok(compressed) = read_file(&path) else {
        eprintln!("SKIPPED: cannot read {}: set TARN_DATA to the folder of public data", path.display());
        return None;
    };
    Some(read(flate2::bufread::MultiGzDecoder::new(compressed.as_slice()), layout).unwrap())
}

#[expect(clippy::disallowed_methods, reason = "reads the public traces")]
fn read_file(path: &std::path::Path) -> std::io::Result<Vec<u8>> {
    std::fs::read(path)
}
