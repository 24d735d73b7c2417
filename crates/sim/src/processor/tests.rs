//! Tests of the core model: slower memory never speeds up a program, caches hide latency, and
//! independent misses overlap.

use prediction::sensitivity::{CORE_BOUND_INDEX, COUNTER_NAMES, DRAM_BOUND_INDEX, MEMORY_BOUND_INDEX};
use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;

use super::*;

fn slowdown(name: &str) -> f64 {
    measure_kernel(name).slowdown
}

fn measure_kernel(name: &str) -> Measurement {
    let kernel = kernel_family()
        .into_iter()
        .find(|kernel| kernel.name == name)
        .unwrap_or_else(|| panic!("no kernel {name}"));
    measure(&SERVER_CORE, &kernel.program(0), &Memory::synthetic(100.0, 8.0), &Memory::synthetic(250.0, 6.0))
}

fn counter(measured: &Measurement, name: &str) -> f64 {
    measured.counters[COUNTER_NAMES.iter().position(|other| *other == name).unwrap()]
}

#[test]
fn derived_counter_indexes_match_names() {
    for (at, name) in [
        (CORE_BOUND_INDEX, "core_bound"),
        (MEMORY_BOUND_INDEX, "memory_bound"),
        (DRAM_BOUND_INDEX, "dram_bound"),
    ] {
        assert_eq!(COUNTER_NAMES[at], name);
    }
}

#[test]
fn family_has_at_least_150_uniquely_named_programs() {
    let names: std::collections::BTreeSet<String> =
        kernel_family().into_iter().map(|kernel| kernel.name).collect();
    assert_eq!(names.len(), kernel_family().len());
    assert!(names.len() >= 150, "{}", names.len());
}

#[test]
fn pointer_chase_slows_down_with_memory_unless_cached() {
    let memory = measure_kernel("chase-262144KiB-10i-3.2p-0.2c");
    assert!((1.4..1.5).contains(&memory.slowdown), "slowdown at 250 ns over 100 ns: {}", memory.slowdown);
    assert!(
        counter(&memory, "dram_latency_bound") > 0.5 && counter(&memory, "memory_level_parallelism") < 1.1
    );
    let cached = measure_kernel("chase-64KiB-10i-3.2p-0.2c");
    assert!(cached.slowdown < 0.001, "{}", cached.slowdown);
    assert!(counter(&cached, "l3_mpki") == 0.0 && counter(&cached, "dram_bound") == 0.0);
}

#[test]
fn working_set_that_fits_the_caches_is_preloaded() {
    for kernel in [
        "chase-1024KiB-10i-3.2p-0.2c",
        "scatter-4KiB-5i-3p-0.2c",
        "keyvalue-skew0.99-value4-1024KiB-100i-3.2p-6c",
    ] {
        let measured = measure_kernel(kernel);
        assert!(measured.slowdown < 0.01 && counter(&measured, "l3_mpki") < 0.1, "{kernel}: {measured:?}");
    }
    // A working set of 3 MiB exceeds the L2 cache but fits into L2 and L3 together, so that most
    // accesses hit L3.
    let mut program = kernel_family()[8].program(1);
    let lines = 48 * 1024;
    program.memory = std::iter::once(0..lines).collect();
    program.accesses.iter_mut().for_each(|access| access.line %= lines);
    let measured =
        measure(&SERVER_CORE, &program, &Memory::synthetic(100.0, 8.0), &Memory::synthetic(250.0, 6.0));
    assert!(counter(&measured, "l3_bound") > 0.1 && counter(&measured, "l3_mpki") < 5.0, "{measured:?}");
}

#[test]
fn assumed_utilization_matches_simulated_utilization() {
    let memory = Memory::synthetic(250.0, 6.0);
    for name in [
        "scatter-262144KiB-250i-3.2p-0.2c",
        "scatter-262144KiB-60i-3.2p-0.2c",
        "chase-262144KiB-10i-3.2p-0.2c",
    ] {
        let kernel = kernel_family().into_iter().find(|kernel| kernel.name == name).unwrap();
        let program = kernel.program(0);
        let levels = CacheHierarchy::new(&SERVER_CORE).simulate(&program);
        let run = Run::simulate(&SERVER_CORE, &program, &levels, &memory);
        let deviation = run.utilization - run.assumed_utilization;
        assert!(
            run.utilization <= 1.0 && (deviation.abs() < 0.05 || run.utilization > 0.8),
            "{name}: assumed utilization {}, simulated utilization {}",
            run.assumed_utilization,
            run.utilization
        );
    }
}

#[test]
fn independent_misses_overlap() {
    let scattered = measure_kernel("scatter-262144KiB-250i-3.2p-0.2c");
    let chased = measure_kernel("chase-262144KiB-300i-3.2p-0.2c");
    assert!(counter(&scattered, "memory_level_parallelism") > 1.5, "{scattered:?}");
    assert!(counter(&scattered, "dram_bound") < counter(&chased, "dram_bound"), "{scattered:?} {chased:?}");
}

#[test]
fn stream_is_bandwidth_bound_and_prefetch_hides_latency() {
    let fast = measure_kernel("stream-arrays4-writesfalse-65536KiB-8i-3.2p-0.2c");
    assert!(counter(&fast, "dram_bandwidth_bound") > counter(&fast, "dram_latency_bound"), "{fast:?}");
    let slow = measure_kernel("stream-arrays1-writesfalse-65536KiB-200i-3.2p-0.2c");
    assert!(counter(&slow, "dram_bound") < 0.05, "{slow:?}");
}

#[test]
fn slowdown_is_zero_for_equal_memory_and_never_negative() {
    let local = Memory::synthetic(100.0, 8.0);
    for kernel in kernel_family().iter().step_by(7) {
        let program = kernel.program(1);
        assert_eq!(measure(&SERVER_CORE, &program, &local, &local).slowdown, 0.0, "{}", kernel.name);
        let slower = measure(&SERVER_CORE, &program, &local, &Memory::synthetic(180.0, 8.0)).slowdown;
        let slowest = measure(&SERVER_CORE, &program, &local, &Memory::synthetic(300.0, 8.0)).slowdown;
        assert!(0.0 <= slower && slower <= slowest + 0.01, "{}: {slower} {slowest}", kernel.name);
    }
}

#[test]
fn counters_are_finite_and_slot_fractions_sum_to_one() {
    for kernel in kernel_family().iter().step_by(5) {
        let measured = measure(
            &SERVER_CORE,
            &kernel.program(2),
            &Memory::synthetic(100.0, 8.0),
            &Memory::synthetic(250.0, 6.0),
        );
        assert!(
            measured.counters.iter().all(|counter| counter.is_finite() && *counter >= 0.0),
            "{measured:?}"
        );
        let slots: f64 = measured.counters[..5].iter().sum();
        assert!((0.95..1.05).contains(&slots), "{}: {slots}", kernel.name);
    }
}

#[test]
fn noise_is_small_and_deterministic() {
    let counters = [1.0; COUNTER_NAMES.len()];
    let add_noise = |seed| add_noise(&counters, &mut Pcg64Mcg::seed_from_u64(seed));
    assert_eq!(add_noise(1), add_noise(1));
    assert_ne!(add_noise(1), add_noise(2));
    let [counted, others] = [&add_noise(1)[5..11], &add_noise(1)[12..]];
    assert!(counted.iter().chain(others).all(|counter| (0.7..1.3).contains(counter)));
    assert_eq!(
        add_noise(1)[11],
        add_noise(1)[8] + add_noise(1)[9],
        "dram_bound is the sum of dram_latency_bound and dram_bandwidth_bound"
    );
    assert_eq!(
        add_noise(1)[4],
        add_noise(1)[5..8].iter().sum::<f64>() + add_noise(1)[11] + add_noise(1)[10],
        "memory_bound is the sum of the cache, DRAM and store counters"
    );
    let idle = super::add_noise(&[0.0; COUNTER_NAMES.len()], &mut Pcg64Mcg::seed_from_u64(1));
    assert!(idle[5..11].iter().all(|counter| (0.0..0.02).contains(counter)), "{idle:?}");
}

#[test]
fn latency_curve_of_selected_server_is_read_and_never_falls() {
    let text = "server,dst,threads,mlc_w,random,inject_delay,latency_ns,bandwidth_mb_s,mlc_cmdline\n\
        cxl,d0,16,0,0,0,400,40000,x\ncxl,d0,16,0,0,9,250,20000,x\ncxl,d0,16,0,0,20,260,4000,x\n\
        cxl,d1,8,0,0,0,1,1,x\nddr5,d0,16,0,0,0,90,60000,x\n";
    let memory = read_latency(text.as_bytes(), "cxl").unwrap();
    assert_eq!(memory.gb_per_s, 2.5);
    assert_eq!(memory.curve, [(0.0, 260.0), (0.1, 260.0), (0.5, 260.0), (1.0, 400.0)]);
    assert_eq!(
        [0.0, 0.3, 0.75, 1.0, 2.0].map(|used| memory.latency_ns(used)),
        [260.0, 260.0, 330.0, 400.0, 400.0]
    );
    let error_of = |text: &str, server: &str| read_latency(text.as_bytes(), server).unwrap_err().to_string();
    assert!(error_of(text, "ddr5").starts_with("server \"ddr5\": 1 rows"));
    assert_eq!(error_of("server\n", "cxl"), "missing column \"dst\"");
    assert_eq!(error_of("server,dst,dst\n", "cxl"), "duplicate column \"dst\"");
    let wrong = |from: &str, to: &str| error_of(&text.replace(from, to), "cxl");
    assert_eq!(wrong(",400,", ",16,"), "line 2: latency_ns = \"16\": must be a number from 40 to 100000");
    assert_eq!(
        wrong(",20000,", ",NaN,"),
        "line 3: bandwidth_mb_s = \"NaN\": must be a number from 1 to 10000000"
    );
}

#[test]
fn memory_and_key_traces_are_converted_into_programs() {
    let memory: String =
        (0..100_000).map(|n| format!("{},{},3\n", if n % 4 == 0 { "s" } else { "l" }, n * 8)).collect();
    let programs = read_trace(format!("op,addr,insns_since_prev\n{memory}").as_bytes()).unwrap();
    let [(apart, one), (chained, other)] = &programs[..] else { panic!("{}", programs.len()) };
    assert_eq!((apart.as_str(), chained.as_str(), one.len()), ("-apart", "-chained", 1));
    assert_eq!(one[0].accesses[8].line, 1);
    assert_eq!(
        [other[0].accesses[1].dependency, other[0].accesses[0].dependency],
        [Dependency::LastLoad, Dependency::None]
    );
    let keys: String = (0..20_000).map(|n| format!("{n}\n")).collect();
    assert_eq!(read_trace(format!("key\n{keys}").as_bytes()).unwrap()[0].1.len(), 1);
    let error_of = |text: &str| read_trace(text.as_bytes()).unwrap_err().to_string();
    assert_eq!(error_of("key\n1\n"), "5 memory accesses: must be at least 100000");
    assert!(error_of("key\n1\nx\n").starts_with("line 3: must be a whole number"));
    assert!(error_of("a,b\n1,2\n").starts_with("missing columns: must have `key`"));
}

#[test]
fn slowdown_grows_with_fraction_of_pointer_chases() {
    assert!(
        slowdown("phases-chase1-262144KiB-40i-3.2p-0.2c")
            < slowdown("phases-chase30-262144KiB-40i-3.2p-0.2c")
    );
}
