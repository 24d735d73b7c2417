//! Tests of the trace reader: layouts, errors for malformed rows, and the order of events.

use proptest::prelude::*;

use super::*;

const TRACE_HEADER: &str = "vm_id,arrive_s,depart_s,cores,mem_gb\n";

fn trace(text: &str) -> Result<Trace, TraceError> {
    read(text.as_bytes(), Strictness::Strict)
}

/// Returns the VMs of a trace, formatted as `id@arrive-depart:cores/memory` and joined by spaces.
fn summarize_trace(text: &str) -> String {
    let time = |at: Option<Ns>| at.map_or(String::new(), |at| format!("{}", at.as_ms() as f64 / 1000.0));
    let format_vm = |vm: &Arrival| {
        format!("{}@{}-{}:{}/{}", vm.id, time(vm.arrive), time(vm.depart), vm.cores, vm.memory)
    };
    trace(text).unwrap().arrivals.iter().map(format_vm).collect::<Vec<_>>().join(" ")
}

fn error_of(text: &str) -> String {
    trace(text).unwrap_err().to_string()
}

#[test]
fn columns_are_matched_by_name_in_any_order() {
    let azure = "vm_id,batch_id,arrive_s,depart_s,censored,life_lo_s,life_hi_s,cores,mem_gb\n0,0,0,300,0,300,300,8,14.0\n";
    assert_eq!(summarize_trace(azure), "0@0-300:8/14GiB");
    assert_eq!(summarize_trace("vm_id,arrive_s,depart_s,cores,mem_gb\na,2,500,4,16\n"), "a@2-500:4/16GiB");
    let alibaba = "vm_id,app_name,role,cores,mem_gb,gpu_request,max_instance_per_node,arrive_s,scheduled_s,depart_s\n\
                   7,app_0,HN,12,120.0,1,8,,,\n";
    assert_eq!(summarize_trace(alibaba), "7@-:12/120GiB");
    assert_eq!(trace(alibaba).unwrap().arrivals[0].owner.as_deref(), Some("app_0"));
}

#[test]
fn azure_table_is_read_without_header_and_with_buckets() {
    let rows = "a+/=,s,d,0,2591700,9.1,1.0,5.2,Delay-insensitive,4,32\nb,s,d,300,,9,1,5,Unknown,>24,>64\n";
    assert_eq!(summarize_trace(rows), "a+/=@0-2591700:4/32GiB b@300-:30/70GiB");
    assert_eq!(trace(rows).unwrap().layout, Layout::AzureVmTable);
    assert_eq!(trace(rows).unwrap().arrivals[1].line, 2);
}

#[test]
fn header_of_azure_table_selects_its_columns() {
    let names = ["vmcorecountbucket,vmmemorybucket", "vmcorecount,vmmemory"];
    for sizes in names {
        let text = format!(
            "vmid,subscriptionid,deploymentid,vmcreated,vmdeleted,maxcpu,avgcpu,p95maxcpu,vmcategory,{sizes}\n\
             b,s7,d,300,,9,1,5,Unknown,>24,1.75\n"
        );
        assert_eq!(summarize_trace(&text), "b@300-:30/1792MiB");
        let trace = trace(&text).unwrap();
        assert_eq!((trace.layout, trace.arrivals[0].owner.as_deref()), (Layout::AzureVmTable, Some("s7")));
    }
}

#[test]
fn table_of_pods_has_millicores_and_mib() {
    let header = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n";
    let rows = "p-0,12000,16384,1,1000,,LS,Running,0,12537496,0.0\np-1,3152,262144,0,0,,BE,Failed,9,,\n";
    assert_eq!(summarize_trace(&format!("{header}{rows}")), "p-0@0-12537496:12/16GiB p-1@9-:4/256GiB");
    let error = error_of(&format!("{header}p-0,0,1,1,1,,LS,Running,0,1,0\n"));
    assert_eq!(
        error,
        "line 2: cpu_milli = \"0\": must be a whole number of thousandths of a core, from 1 to 4096 cores"
    );
    let error = error_of(&format!("{header}p-0,1,-4,1,1,,LS,Running,0,1,0\n"));
    assert_eq!(
        error,
        "line 2: memory_mib = \"-4\": must be a number of MiB that is at least 1 and at most 64 TiB"
    );
}

#[test]
fn creations_and_deletions_are_joined() {
    let header = "vmid,cpu,memory,time,type\n";
    let rows = "7,1,2,0,0\n8,4,8,5,0\n7,1,2,60,1\n9,2,1,60,0\n9,2,1,60,1\n";
    let joined = "7@0-60:1/2GiB 8@5-:4/8GiB 9@60-60:2/1GiB";
    assert_eq!(summarize_trace(&format!("{header}{rows}")), joined);
    let trace = trace(&format!("{header}{rows}")).unwrap();
    assert_eq!((trace.layout, trace.arrivals[2].line), (Layout::HuaweiEvents, 5));
    let cases = [
        ("7,1,2,0,2\n", "line 2: type = \"2\": must be 0 (creation) or 1 (deletion)"),
        ("7,1,2,0,0\n7,1,2,1,0\n", "line 3: vmid = \"7\": must not be the ID of a VM that was not deleted"),
        ("7,1,2,0,1\n", "line 2: vmid = \"7\": must be the ID of a VM that was created and not deleted"),
        ("7,1,2,0\n", "line 2: row = \"4 columns\": must have as many columns as the first row"),
        ("7,1,2,9,0\n7,1,2,8,1\n", "line 3: time = \"8\": must not be before the arrival"),
        ("7,0,2,9,0\n", "line 2: cpu = \"0\": must be a whole number of cores from 1 to 4096"),
    ];
    for (rows, expected) in cases {
        assert_eq!(error_of(&format!("{header}{rows}")), expected);
    }
    let lenient = read(format!("{header}x,1,2,0,7\n7,1,2,0,0\n").as_bytes(), Strictness::Lenient).unwrap();
    assert_eq!((lenient.skipped, lenient.arrivals.len()), (1, 1));
}

#[test]
fn optional_columns_are_read_if_present() {
    let header = "vm_id,arrive_s,depart_s,cores,mem_gb,owner,socket,touched_gb\n";
    let text = format!("{header}a,0,1,1,4,c1,7,2.5\nb,0,1,1,4,,0,\n");
    let mut rows = TraceRows::new(text.as_bytes()).unwrap();
    let has = [TraceColumn::Owner, TraceColumn::Socket, TraceColumn::Touched].map(|column| rows.has(column));
    assert_eq!(has, [true; 3]);
    let row = rows.next_row().unwrap().unwrap().unwrap();
    assert_eq!((row.owner, row.socket, row.touched), (Some("c1"), Some(7), Some(Bytes::mib(2560))));
    let row = rows.next_row().unwrap().unwrap().unwrap();
    assert_eq!((row.owner, row.socket, row.touched), (Some(""), Some(0), None));
    assert!(rows.next_row().unwrap().is_none());
    for (row, expected) in [
        ("a,0,1,1,4,,-1,", "line 2: socket = \"-1\": must be empty or the whole number of a socket"),
        ("a,0,1,1,4,,0,4.1", "line 2: touched_gb = \"4.1\": must be empty or a number of GB that is at most"),
    ] {
        let error = error_of(&format!("{header}{row}\n"));
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn bucket_is_rejected_outside_azure_table() {
    assert!(
        error_of(&format!("{TRACE_HEADER}a,0,1,>24,1\n")).starts_with("line 2: cores = \">24\": must be")
    );
}

#[test]
fn fractional_gb_is_rounded_to_whole_mib() {
    assert_eq!(
        summarize_trace(&format!("{TRACE_HEADER}a,0,,1,0.75\nb,0,,1,1.7501\n")),
        "a@0-:1/768MiB b@0-:1/1792MiB"
    );
}

#[test]
fn malformed_row_error_names_line_column_value_and_rule() {
    let cases = [
        ("a,0,1,0,1", "line 3: cores = \"0\": must be a whole number of cores from 1 to 4096"),
        ("a,0,1,-1,1", "line 3: cores = \"-1\": must be a whole number of cores from 1 to 4096"),
        (
            "a,0,1,99999999999,1",
            "line 3: cores = \"99999999999\": must be a whole number of cores from 1 to 4096",
        ),
        ("a,0,1,2.5,1", "line 3: cores = \"2.5\": must be a whole number of cores from 1 to 4096"),
        ("a,0,1,,1", "line 3: cores = \"\": must be a whole number of cores from 1 to 4096"),
        ("a,0,1,1,0", "line 3: mem_gb = \"0\": must be a number of GB"),
        ("a,0,1,1,nan", "line 3: mem_gb = \"nan\": must be a number of GB"),
        ("a,0,1,1,1e9", "line 3: mem_gb = \"1e9\": must be a number of GB"),
        ("a,0,1,1,99999999999", "line 3: mem_gb = \"99999999999\": must be a number of GB"),
        ("a,-5,1,1,1", "line 3: arrive_s = \"-5\": must be empty or a number of seconds"),
        ("a,x,1,1,1", "line 3: arrive_s = \"x\": must be empty or a number of seconds"),
        ("a,9,3,1,1", "line 3: depart_s = \"3\": must not be before the arrival"),
        (",0,1,1,1", "line 3: vm_id = \"\": must not be empty"),
        ("a,0,1,1", "line 3: row = \"4 columns\": must have as many columns"),
        ("a,0,1,1,1,1", "line 3: row = \"6 columns\": must have as many columns"),
    ];
    for (row, expected) in cases {
        let error = error_of(&format!("{TRACE_HEADER}ok,0,1,1,1\n{row}\n"));
        assert!(error.starts_with(expected), "{row}: {error}");
    }
}

#[test]
fn lenient_reader_counts_skipped_rows() {
    let text = format!("{TRACE_HEADER}a,0,1,1,1\nb,0,1,0,1\nc,0\nd,0,1,1,1\n");
    let trace = read(text.as_bytes(), Strictness::Lenient).unwrap();
    assert_eq!(trace.arrivals.iter().map(|vm| vm.id.as_str()).collect::<Vec<_>>(), ["a", "d"]);
    assert_eq!((trace.skipped, trace.first_skipped.unwrap().line), (2, 3));
}

#[test]
fn unknown_layout_is_rejected() {
    assert!(matches!(trace(""), Err(TraceError::Empty)));
    for text in ["arrive_s,batch_id,cores,mem_gb\n300,0,2,3.5\n", "\0\u{1}binary", "1,2,3\n"] {
        assert!(error_of(text).starts_with("line 1:"), "{text:?}");
    }
    for header in [
        "vmid,subscriptionid,deploymentid,vmcreated,vmdeleted,maxcpu,avgcpu,p95maxcpu,vmcategory,cores,memory\n",
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time\n",
    ] {
        assert!(error_of(header).contains("must be a header with vm_id"), "{}", error_of(header));
    }
}

#[test]
fn missing_columns_are_named() {
    let error = error_of("vm_id,arrive_s,cores,memory\na,0,1,1\n");
    assert!(error.ends_with("cores and mem_gb: missing depart_s, mem_gb"), "{error}");
    assert!(error_of("id,cores\na,1\n").contains("Azure's VM table"));
}

#[test]
fn repeated_columns_are_rejected() {
    let error = error_of("vm_id,arrive_s,depart_s,cores,mem_gb,mem_gb\na,0,1,1,1,2\n");
    assert_eq!(error, "line 1: \"mem_gb\": a column must not be repeated");
    assert!(trace("vm_id,arrive_s,depart_s,cores,mem_gb,,\na,0,1,1,1,2,3\n").is_ok());
}

#[test]
fn non_utf8_row_is_malformed() {
    let mut bytes = TRACE_HEADER.as_bytes().to_vec();
    bytes.extend_from_slice(b"a\xff,0,1,1,1\n");
    let error = read(bytes.as_slice(), Strictness::Strict).unwrap_err().to_string();
    assert!(error.starts_with("line 2: vm_id = \"a\u{fffd}\": must be UTF-8"), "{error}");
}

/// Returns the events of a trace in order: `+id` for an arrival, `-id` for a departure.
fn event_order(text: &str) -> String {
    let trace = trace(&format!("{TRACE_HEADER}{text}")).unwrap();
    let sign = |kind| if kind == EventKind::Arrive { '+' } else { '-' };
    let format_event = |e: &Event| format!("{}{}", sign(e.kind), trace.arrivals[e.index].id);
    events(&trace.arrivals).iter().map(format_event).collect::<Vec<_>>().join(" ")
}

#[test]
fn departures_precede_arrivals_of_same_time() {
    assert_eq!(event_order("a,0,10,1,1\nb,10,,1,1\nc,5,10,1,1\n"), "+a +c -a -c +b");
}

#[test]
fn initial_vms_precede_all_other_events() {
    assert_eq!(event_order("b,0,9,1,1\na,,0,1,1\n"), "+a -a +b -b");
}

#[test]
fn vm_departing_at_arrival_time_arrives_first() {
    assert_eq!(event_order("a,7,7,1,1\nb,7,,1,1\n"), "+a +b -a");
}

#[test]
fn first_returns_earliest_arrivals() {
    let trace = trace(&format!("{TRACE_HEADER}a,9,,1,1\nb,,,1,1\nc,3,,1,1\n")).unwrap();
    let ids: Vec<String> = first(trace.arrivals, 2).into_iter().map(|vm| vm.id).collect();
    assert_eq!(ids, ["b", "c"]);
}

proptest! {
    #[test]
    fn vm_arrives_once_and_departs_at_most_once(times in prop::collection::vec((0..20u64, 0..5u64, any::<bool>()), 1..40)) {
        let rows = times.iter().enumerate().map(|(i, (at, life, stays))| {
            let depart = if *stays { String::new() } else { (at + life).to_string() };
            format!("{i},{at},{depart},1,1\n")
        });
        let trace = trace(&format!("{TRACE_HEADER}{}", rows.collect::<String>())).unwrap();
        let events = events(&trace.arrivals);
        prop_assert!(events.is_sorted_by_key(|e| e.at));
        for (index, (_, _, stays)) in times.iter().enumerate() {
            let own: Vec<EventKind> = events.iter().filter(|e| e.index == index).map(|e| e.kind).collect();
            prop_assert_eq!(own, if *stays { vec![EventKind::Arrive] } else { vec![EventKind::Arrive, EventKind::Depart] });
        }
    }

    #[test]
    fn reader_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read(bytes.as_slice(), Strictness::Lenient);
        let _ = read([TRACE_HEADER.as_bytes(), &bytes].concat().as_slice(), Strictness::Lenient);
    }
}

#[test]
fn public_traces_are_read_completely() {
    let rows = [
        ("vm-arrivals/azure-v1/vms.csv.gz", 259_159),
        ("vm-arrivals/huawei-east-1/vms.csv.gz", 72_837),
        ("vm-arrivals/alibaba-dlrm-2025/instances.csv.gz", 15_945),
        ("vm-arrivals/alibaba-openb-2023/pods.csv.gz", 5_701),
    ];
    for (name, expected) in rows {
        let Some(input) = crate::public_data::open_gz(name) else { continue };
        let trace = read(input, Strictness::Strict).unwrap();
        assert_eq!(trace.arrivals.len(), expected, "{name}");
        assert!(events(&trace.arrivals).len() >= expected);
    }
}
