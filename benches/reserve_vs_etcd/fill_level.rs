//! Measures reservations in racks that differ only in the number of taken slices. The racks are
//! measured in turns.

use std::time::Duration;

use benches::{
    disk::Disk,
    failure::Failure,
    load::LoadLimits,
    programs::Programs,
    rack::{Rack, Reserver},
    report::format_table,
};
use proto::bearer::ClientChannel;

use super::{Args, COLUMN_HEADINGS, LoadSeries, MANY_CLIENT_COUNT, print_progress, ratios, reserve};

/// Maximum number of reservations in one measurement, the same for all racks. Less than the number
/// of free slices in the fullest rack.
const WRITES_MAX: u64 = 4096;

/// Rack with `taken` slices in use, and the results of the loads on this rack.
struct FilledRack {
    taken: u32,
    rack: Rack,
    channels: Vec<ClientChannel>,
    one_client: LoadSeries,
    many_clients: LoadSeries,
}

pub(crate) async fn measure(args: &Args, programs: &Programs, disk: &Disk) -> Result<String, Failure> {
    let mut racks = Vec::new();
    for taken in &args.taken {
        racks.push(FilledRack::start(args, programs, disk, *taken).await?);
    }
    for round in 0..args.rounds {
        for rack in &mut racks {
            rack.measure_round(args, &format!("t{round}")).await?;
        }
        racks.reverse();
    }
    racks.sort_by_key(|rack| rack.taken);
    Ok(report(&racks))
}

fn report(racks: &[FilledRack]) -> String {
    let rows: Vec<_> = racks.iter().flat_map(FilledRack::rows).collect();
    let mut report = format!("\n{}\n", format_table(&COLUMN_HEADINGS, &rows));
    if let [fewest, .., most] = racks {
        report += &ratios(
            "reserve_64_taken",
            &most.many_clients.writes_per_second,
            &fewest.many_clients.writes_per_second,
        );
        report += &ratios(
            "reserve_1_taken",
            &most.one_client.writes_per_second,
            &fewest.one_client.writes_per_second,
        );
    }
    report
}

impl FilledRack {
    async fn start(args: &Args, programs: &Programs, disk: &Disk, taken: u32) -> Result<Self, Failure> {
        let folder = disk.create_folder(&format!("taken-{taken}"))?;
        let mut rack = Rack::start(args.plan, programs, &folder).await?;
        let channels = rack.connect(args.channels).await?;
        rack.reserve_and_keep(&channels[0], taken).await?;
        let mut rack = Self {
            taken,
            rack,
            channels,
            one_client: LoadSeries::default(),
            many_clients: LoadSeries::default(),
        };
        rack.load(args, MANY_CLIENT_COUNT, "warm", Duration::from_millis(300)).await?;
        (rack.one_client, rack.many_clients) = Default::default();
        Ok(rack)
    }

    async fn measure_round(&mut self, args: &Args, round: &str) -> Result<(), Failure> {
        for clients in [1, MANY_CLIENT_COUNT] {
            self.load(args, clients, round, Duration::from_secs_f64(args.seconds)).await?;
        }
        Ok(())
    }

    async fn load(
        &mut self,
        args: &Args,
        clients: usize,
        round: &str,
        after: Duration,
    ) -> Result<(), Failure> {
        let round = format!("{round}-{clients}");
        let channel = |n: usize| self.channels[n % self.channels.len()].clone();
        let writer = |n: usize| Reserver::new(channel(n), args.plan, &round);
        let writers = (0..clients).map(writer).collect();
        let limits = LoadLimits { duration_max: after, writes_max: WRITES_MAX };
        let load_result = reserve(&mut self.rack, &self.channels, writers, limits).await?;
        print_progress(&format!("tarn, {} taken", self.taken), clients, &load_result.outcome);
        let series = if clients == 1 { &mut self.one_client } else { &mut self.many_clients };
        series.add(&load_result.outcome, load_result.before, load_result.after);
        Ok(())
    }

    fn rows(&self) -> [Vec<String>; 2] {
        let name = |clients: &str| format!("tarn, {} slices taken, {clients}", self.taken);
        [self.one_client.row(&name("1 client")), self.many_clients.row(&name("64 clients"))]
    }
}
