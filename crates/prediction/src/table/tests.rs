//! What tables say, and what is said of tables that say nothing.

use units::{Bytes, Fraction, UnixMs};

use super::*;
use crate::frigid::trial;

const OWN: &str =
    "began_s,ended_s,requested_gib,peak_gib,vm,key,kind,place,cores,p99_gib,mean_gib,busy_percent,suspect";

fn own(text: &str) -> Result<Vec<Stay>, TableError> {
    read(text.as_bytes(), Layout::Own)
}

fn refusal(row: &str) -> String {
    own(&format!("{OWN}\n{row}\n")).unwrap_err().to_string()
}

#[test]
fn a_table_of_ones_own_needs_four_columns() {
    let row = &own("peak_gib,requested_gib,began_s,ended_s\n3,8,1.5,60\n").unwrap()[0];
    assert_eq!(row.ask.requested, Bytes::gib(8));
    assert_eq!((row.ask.begins, row.outcome.ended), (UnixMs(1500), UnixMs(60_000)));
    assert_eq!(row.outcome.untouched.get(), 0.625);
    assert!(row.sound && row.ask.cores.is_none() && row.ask.groups.owner().is_none());
}

#[test]
fn lines_are_counted_as_an_editor_counts_them_whatever_breaks_them() {
    // Breaks of two bytes made every line that was named one too low.
    for (lines_break, mend) in [("\n", ""), ("\r\n", ""), ("\r", ""), ("\r\n", "\r\n")] {
        let text = ["peak_gib,requested_gib,began_s,ended_s", "3,8,60,60", "3,8,60,60", "3,x,60,60"];
        let table = text.join(lines_break) + mend;
        // A byte at a time, no break comes whole.
        for bytes in [1, 7, 1 << 16] {
            let input = io::BufReader::with_capacity(bytes, table.as_bytes());
            let wrong = read(Trickle(input), Layout::Own).unwrap_err().to_string();
            assert!(wrong.starts_with("line 4: requested_gib = \"x\""), "{lines_break:?}: {wrong}");
        }
        let short = text[..3].join(lines_break) + lines_break + "3,8";
        let wrong = own(&short).unwrap_err().to_string();
        assert!(wrong.starts_with("line 4: 2 values"), "{lines_break:?}: {wrong}");
    }
}

/// Gives what its buffer holds, and never more.
struct Trickle<R>(R);

impl<R: io::BufRead> io::Read for Trickle<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let held = self.0.fill_buf()?;
        let read = held.len().min(bytes.len());
        bytes[..read].copy_from_slice(&held[..read]);
        self.0.consume(read);
        Ok(read)
    }
}

#[test]
fn a_vm_may_end_at_once() {
    assert_eq!(own("peak_gib,requested_gib,began_s,ended_s\n3,8,60,60\n").unwrap().len(), 1);
}

#[test]
fn everything_that_may_be_known_is_read() {
    let row = &own(&format!("{OWN}\n0,60,8,12,v,k,large,eu linux,4,2,1,30.5,1\n")).unwrap()[0];
    assert_eq!(row.ask.groups.all(), ["v", "k", "large", "eu linux"]);
    assert_eq!(row.ask.cores, Some(4.0));
    assert_eq!(row.outcome.untouched.get(), 0.0, "it touched more than it asked for");
    assert_eq!((row.outcome.usage.p99, row.outcome.usage.mean), (Some(Bytes::gib(2)), Some(Bytes::gib(1))));
    assert_eq!(row.outcome.usage.busy_percent, Some(30.5));
    assert!(!row.sound);
}

#[test]
fn a_wrong_value_is_named_by_line_column_value_and_rule() {
    let cases = [
        ("x,60,8,1,,,,,,,,,", "line 2: began_s = \"x\": must be a number of seconds from 0 to 100 years"),
        ("-1,60,8,1,,,,,,,,,", "line 2: began_s = \"-1\": must be a number of seconds"),
        ("1e99,60,8,1,,,,,,,,,", "line 2: began_s = \"1e99\": must be a number of seconds"),
        ("0,NaN,8,1,,,,,,,,,", "line 2: ended_s = \"NaN\": must be a number of seconds"),
        ("9,8,8,1,,,,,,,,,", "line 2: ended_s = \"8\": must not be before the VM began"),
        ("0,1,0,1,,,,,,,,,", "line 2: requested_gib = \"0\": must be a number above 0"),
        ("0,1,nan,1,,,,,,,,,", "line 2: requested_gib = \"nan\": must be a number above 0"),
        ("0,1,inf,1,,,,,,,,,", "line 2: requested_gib = \"inf\": must be a number above 0"),
        ("0,1,99999999,1,,,,,,,,,", "line 2: requested_gib = \"99999999\": must be a number above 0"),
        ("0,1,8,,,,,,,,,,", "line 2: peak_gib = \"\": must be a number from 0"),
        ("0,1,8,-2,,,,,,,,,", "line 2: peak_gib = \"-2\": must be a number from 0"),
        ("0,1,8,1,,,,,-1,,,,", "line 2: cores = \"-1\": must be a number from 0 to 4096"),
        ("0,1,8,1,,,,,,,x,,", "line 2: mean_gib = \"x\": must be a number from 0"),
        ("0,1,8,1,,,,,,,,,maybe", "line 2: suspect = \"maybe\": must be 0 or 1"),
        ("0,1,8", "line 2: 3 values: must be 13, as the first line has names"),
    ];
    for (row, expected) in cases {
        let said = refusal(row);
        assert!(said.starts_with(expected), "{said}");
    }
}

#[test]
fn a_quote_that_is_not_closed_swallows_nothing() {
    let rows = "began_s,ended_s,requested_gib,peak_gib,vm\n0,1,8,1,\"a\n0,1,8,1,b\n0,1,8,1,c\"\n0,1,8,1,d\n";
    for text in [rows, &rows[..rows.len() - 14]] {
        assert_eq!(
            own(text).unwrap_err().to_string(),
            "line 2: a value has a line break: is a quote not closed?"
        );
    }
}

#[test]
fn a_column_that_is_missing_or_unknown_is_named() {
    let said = |text: &str| own(text).unwrap_err().to_string();
    assert_eq!(said(""), "there is no column \"began_s\": must be one of the first line's names");
    assert!(said("began_s,ended_s,requested_gib\n").starts_with("there is no column \"peak_gib\""));
    assert!(
        said(&format!("{OWN},peak_gb\n")).starts_with("column \"peak_gb\": must be one of began_s, ended_s")
    );
    assert_eq!(said(&format!("{OWN}\n")), "no rows: must have a line of names and rows");
    assert_eq!(read(&b"a\xff,b\n1,2\n"[..], Layout::Own).unwrap_err().to_string(), "line 1: must be UTF-8");
    let other = read("vm,week\n1,2\n".as_bytes(), Layout::BitbrainsWeek).unwrap_err().to_string();
    assert!(other.starts_with("there is no column \"cores\""));
}

#[test]
fn a_vms_week_ends_before_its_next_begins() {
    let head = "vm,week,cores,mem_cap_kb,mem_p99_kb,mem_mean_kb,cpu_mean_pct,untouched_frac,suspect,more";
    let text =
        format!("{head}\n7,0,2,8388608,1,1,5,0.25,0,x\n7,1,2,8388608,1,1,5,-0.01,1,x\n8,1,2,0,0,0,0,,1,x\n");
    let rows = read(text.as_bytes(), Layout::BitbrainsWeek).unwrap();
    let [first, second] = &rows[..] else { panic!("a week without memory is none: {rows:?}") };
    assert!(first.outcome.ended < second.ask.begins);
    assert_eq!(first.ask.groups.all(), ["7", "", "2 cores, 8GiB", ""]);
    assert_eq!([first.outcome.untouched.get(), second.outcome.untouched.get()], [0.25, 0.0]);
    assert_eq!([first.sound, second.sound], [true, false]);
}

#[test]
fn tasks_of_a_process_are_one_customers() {
    let head =
        "workflow,process,sample_tag,cpus,attempt,start_ms,complete_ms,mem_requested_bytes,untouched_frac";
    let text = format!("{head}\nchipseq,SORT,a.bam,4,1,100,200,1073741824,0.5\n");
    let row = &read(text.as_bytes(), Layout::NfcoreTasks).unwrap()[0];
    assert_eq!(row.ask.groups.all(), ["SORT a.bam", "SORT attempt 1", "chipseq SORT", "chipseq"]);
    assert_eq!((row.ask.begins, row.outcome.ended), (UnixMs(100), UnixMs(200)));
    assert_eq!(row.ask.requested, Bytes::gib(1));
    let backwards = read(text.replace("100,200", "500,200").as_bytes(), Layout::NfcoreTasks).unwrap_err();
    assert_eq!(backwards.to_string(), "line 2: complete_ms = \"200\": must not be before the VM began");
}

/// The public tables, where they lie; never part of the project. README.md's numbers are what this prints.
#[test]
fn forecasts_of_public_tables_keep_their_rate_and_are_better_than_a_fixed_share() {
    if let Some(weeks) = public("vm-memory/bitbrains-rnd/vm_week.csv.gz", Layout::BitbrainsWeek) {
        let number = |stay: &Stay| stay.ask.groups.vm.parse::<u32>().unwrap();
        for draw in 0..4 {
            judge(&format!("weeks, draw {draw} of 4"), weeks.clone(), |stay| number(stay) % 4 == draw);
        }
    }
    if let Some(tasks) = public("task-memory/nfcore-sizey/tasks.csv.gz", Layout::NfcoreTasks) {
        let mut begins: Vec<UnixMs> = tasks.iter().map(|stay| stay.ask.begins).collect();
        begins.sort_unstable();
        let late = begins[begins.len() * 2 / 3];
        judge("tasks, last third", tasks, |stay| stay.ask.begins >= late);
    }
}

fn judge(name: &str, stays: Vec<Stay>, is_tested: impl Fn(&Stay) -> bool) {
    let (test, train): (Vec<Stay>, Vec<Stay>) = stays.into_iter().partition(is_tested);
    let rates = [0.01, 0.02, 0.04, 0.1].map(|rate| Fraction::new(rate).unwrap());
    for said in trial::run(&train, &test, &rates).unwrap() {
        let [asked, over, frigid, slices, fixed, over_fixed] = [
            said.rate_asked,
            said.rate_actual,
            said.frigid_share,
            said.slice_share,
            said.static_share,
            said.static_rate,
        ]
        .map(|share| 100.0 * share);
        println!(
            "{name}: asked {asked:.0} %: over {over:.1} %, forecast {frigid:.1} %, in slices {slices:.1} %; \
             fixed: over {over_fixed:.1} %, {fixed:.1} %"
        );
        assert!(said.rate_actual <= said.rate_asked + 0.01, "{name}: {said:?}");
        assert!(said.frigid_share > said.static_share, "{name}: {said:?}");
    }
}

fn public(name: &str, layout: Layout) -> Option<Vec<Stay>> {
    let folder = std::env::var_os("TARN_DATA").map_or_else(
        || std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data")),
        std::path::PathBuf::from,
    );
    let path = folder.join(name);
    let Ok(packed) = bytes_of(&path) else {
        eprintln!("SKIPPED: no {}: set TARN_DATA to the folder of public data", path.display());
        return None;
    };
    Some(read(flate2::bufread::MultiGzDecoder::new(packed.as_slice()), layout).unwrap())
}

#[expect(clippy::disallowed_methods, reason = "the public files are on a disk")]
fn bytes_of(path: &std::path::Path) -> std::io::Result<Vec<u8>> {
    std::fs::read(path)
}
