//! What a trace says, row by row, and what is said of rows that say nothing.

use proptest::prelude::*;

use super::*;

const HEADER: &str = "vm_id,arrive_s,depart_s,cores,mem_gb\n";

fn trace(text: &str) -> Result<Trace, TraceError> {
    read(text.as_bytes(), Rigour::Strict)
}

/// The VMs of a trace as `id@arrive-depart:cores/memory`, joined by spaces.
fn shown(text: &str) -> String {
    let time = |at: Option<Ns>| at.map_or(String::new(), |at| format!("{}", at.as_ms() as f64 / 1000.0));
    let one = |vm: &Arrival| {
        format!("{}@{}-{}:{}/{}", vm.id, time(vm.arrive), time(vm.depart), vm.cores, vm.memory)
    };
    trace(text).unwrap().arrivals.iter().map(one).collect::<Vec<_>>().join(" ")
}

fn refusal(text: &str) -> String {
    trace(text).unwrap_err().to_string()
}

#[test]
fn columns_are_found_by_name_wherever_they_stand() {
    let azure = "vm_id,batch_id,arrive_s,depart_s,censored,life_lo_s,life_hi_s,cores,mem_gb\n0,0,0,300,0,300,300,8,14.0\n";
    assert_eq!(shown(azure), "0@0-300:8/14GiB");
    assert_eq!(shown("vm_id,arrive_s,depart_s,cores,mem_gb\na,2,500,4,16\n"), "a@2-500:4/16GiB");
    let alibaba = "vm_id,app_name,role,cores,mem_gb,gpu_request,max_instance_per_node,arrive_s,scheduled_s,depart_s\n\
                   7,app_0,HN,12,120.0,1,8,,,\n";
    assert_eq!(shown(alibaba), "7@-:12/120GiB");
    assert_eq!(trace(alibaba).unwrap().arrivals[0].app.as_deref(), Some("app_0"));
}

#[test]
fn azures_vm_table_needs_no_header_and_its_open_buckets_have_sizes() {
    let rows = "a+/=,s,d,0,2591700,9.1,1.0,5.2,Delay-insensitive,4,32\nb,s,d,300,,9,1,5,Unknown,>24,>64\n";
    assert_eq!(shown(rows), "a+/=@0-2591700:4/32GiB b@300-:30/70GiB");
    assert_eq!(trace(rows).unwrap().layout, Layout::AzureVmTable);
    assert_eq!(trace(rows).unwrap().arrivals[1].line, 2);
}

#[test]
fn a_bucket_is_a_size_only_in_azures_table() {
    assert!(refusal(&format!("{HEADER}a,0,1,>24,1\n")).starts_with("line 2: cores = \">24\": must be"));
}

#[test]
fn fractions_of_a_gb_become_whole_mib() {
    assert_eq!(shown(&format!("{HEADER}a,0,,1,0.75\nb,0,,1,1.7501\n")), "a@0-:1/768MiB b@0-:1/1792MiB");
}

#[test]
fn a_malformed_row_is_named_by_line_column_value_and_rule() {
    let cases = [
        ("a,0,1,0,1", "line 3: cores = \"0\": must be a whole number"),
        ("a,0,1,-1,1", "line 3: cores = \"-1\": must be a whole number"),
        ("a,0,1,99999999999,1", "line 3: cores = \"99999999999\": must be a whole number"),
        ("a,0,1,2.5,1", "line 3: cores = \"2.5\": must be a whole number"),
        ("a,0,1,,1", "line 3: cores = \"\": must be a whole number"),
        ("a,0,1,1,0", "line 3: mem_gb = \"0\": must be a number of GB"),
        ("a,0,1,1,nan", "line 3: mem_gb = \"nan\": must be a number of GB"),
        ("a,0,1,1,1e9", "line 3: mem_gb = \"1e9\": must be a number of GB"),
        ("a,0,1,1,99999999999", "line 3: mem_gb = \"99999999999\": must be a number of GB"),
        ("a,-5,1,1,1", "line 3: arrive_s = \"-5\": must be empty or a number of seconds"),
        ("a,x,1,1,1", "line 3: arrive_s = \"x\": must be empty or a number of seconds"),
        ("a,9,3,1,1", "line 3: depart_s = \"3\": must not be before the VM came"),
        (",0,1,1,1", "line 3: vm_id = \"\": must not be empty"),
        ("a,0,1,1", "line 3: row = \"4 columns\": must be as many columns"),
        ("a,0,1,1,1,1", "line 3: row = \"6 columns\": must be as many columns"),
    ];
    for (row, expected) in cases {
        let said = refusal(&format!("{HEADER}ok,0,1,1,1\n{row}\n"));
        assert!(said.starts_with(expected), "{row}: {said}");
    }
}

#[test]
fn a_lenient_reader_counts_what_it_leaves_out() {
    let text = format!("{HEADER}a,0,1,1,1\nb,0,1,0,1\nc,0\nd,0,1,1,1\n");
    let trace = read(text.as_bytes(), Rigour::Lenient).unwrap();
    assert_eq!(trace.arrivals.iter().map(|vm| vm.id.as_str()).collect::<Vec<_>>(), ["a", "d"]);
    assert_eq!((trace.skipped, trace.first_skipped.unwrap().line), (2, 3));
}

#[test]
fn what_is_no_trace_is_not_taken_for_one() {
    assert!(matches!(trace(""), Err(TraceError::Empty)));
    for text in ["arrive_s,batch_id,cores,mem_gb\n300,0,2,3.5\n", "\0\u{1}binary", "1,2,3\n"] {
        assert!(refusal(text).starts_with("line 1:"), "{text:?}");
    }
    for header in [
        "vmid,subscriptionid,deploymentid,vmcreated,vmdeleted,maxcpu,avgcpu,p95maxcpu,vmcategory,cores,memory\n",
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n",
    ] {
        assert!(refusal(header).contains("must be a header with vm_id"), "{}", refusal(header));
    }
}

#[test]
fn bytes_that_are_no_text_are_a_malformed_row() {
    let mut bytes = HEADER.as_bytes().to_vec();
    bytes.extend_from_slice(b"a\xff,0,1,1,1\n");
    let said = read(bytes.as_slice(), Rigour::Strict).unwrap_err().to_string();
    assert!(said.starts_with("line 2: vm_id = \"a\u{fffd}\": must be UTF-8"), "{said}");
}

/// Events as `+id` and `-id`, in order.
fn order(text: &str) -> String {
    let trace = trace(&format!("{HEADER}{text}")).unwrap();
    let sign = |what| if what == What::Arrive { '+' } else { '-' };
    let one = |e: &Event| format!("{}{}", sign(e.what), trace.arrivals[e.index].id);
    events(&trace.arrivals).iter().map(one).collect::<Vec<_>>().join(" ")
}

#[test]
fn departures_make_room_for_arrivals_of_the_same_moment() {
    assert_eq!(order("a,0,10,1,1\nb,10,,1,1\nc,5,10,1,1\n"), "+a +c -a -c +b");
}

#[test]
fn who_was_there_at_the_start_comes_before_everybody() {
    assert_eq!(order("b,0,9,1,1\na,,0,1,1\n"), "+a -a +b -b");
}

#[test]
fn a_vm_that_leaves_at_once_still_comes_first() {
    assert_eq!(order("a,7,7,1,1\nb,7,,1,1\n"), "+a +b -a");
}

#[test]
fn the_first_vms_are_those_that_come_first() {
    let trace = trace(&format!("{HEADER}a,9,,1,1\nb,,,1,1\nc,3,,1,1\n")).unwrap();
    let ids: Vec<String> = first(trace.arrivals, 2).into_iter().map(|vm| vm.id).collect();
    assert_eq!(ids, ["b", "c"]);
}

proptest! {
    #[test]
    fn every_vm_comes_once_and_goes_at_most_once_after_that(times in prop::collection::vec((0..20u64, 0..5u64, any::<bool>()), 1..40)) {
        let rows = times.iter().enumerate().map(|(i, (at, life, stays))| {
            let depart = if *stays { String::new() } else { (at + life).to_string() };
            format!("{i},{at},{depart},1,1\n")
        });
        let trace = trace(&format!("{HEADER}{}", rows.collect::<String>())).unwrap();
        let events = events(&trace.arrivals);
        prop_assert!(events.is_sorted_by_key(|e| e.at));
        for (index, (_, _, stays)) in times.iter().enumerate() {
            let own: Vec<What> = events.iter().filter(|e| e.index == index).map(|e| e.what).collect();
            prop_assert_eq!(own, if *stays { vec![What::Arrive] } else { vec![What::Arrive, What::Depart] });
        }
    }

    #[test]
    fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read(bytes.as_slice(), Rigour::Lenient);
        let _ = read([HEADER.as_bytes(), &bytes].concat().as_slice(), Rigour::Lenient);
    }
}

#[test]
fn the_public_traces_are_read_whole() {
    let rows = [
        ("vm-arrivals/azure-v1/vms.csv.gz", 259_159),
        ("vm-arrivals/huawei-east-1/vms.csv.gz", 72_837),
        ("vm-arrivals/alibaba-dlrm-2025/instances.csv.gz", 15_945),
    ];
    for (name, expected) in rows {
        let Some(input) = crate::public::unpacked(name) else { continue };
        let trace = read(input, Rigour::Strict).unwrap();
        assert_eq!(trace.arrivals.len(), expected, "{name}");
        assert!(events(&trace.arrivals).len() >= expected);
    }
}
