//! Whether a reservation costs more when more slices are taken: racks of one shape, one for each number of slices taken,
//! measured in turns.

use std::time::Duration;

use benches::{
    disk::Disk,
    failure::Failure,
    load::Ends,
    programs::Programs,
    rack::{Rack, Reserver},
    report::table,
};
use proto::bearer::ClientChannel;

use super::{Args, HEAD, MANY, Series, note, ratios, reserve};

/// Reservations of one measurement: as many at each fill level, and fewer than the fullest rack has free slices.
const WRITES_MAX: u64 = 4096;

/// A rack of which some slices stay taken.
struct TakenRack {
    taken: u32,
    rack: Rack,
    channels: Vec<ClientChannel>,
    one: Series,
    many: Series,
}

pub(crate) async fn measure(args: &Args, programs: &Programs, disk: &Disk) -> Result<String, Failure> {
    let mut racks = Vec::new();
    for taken in &args.taken {
        racks.push(TakenRack::start(args, programs, disk, *taken).await?);
    }
    for round in 0..args.rounds {
        for rack in &mut racks {
            rack.round(args, &format!("t{round}")).await?;
        }
        racks.reverse();
    }
    racks.sort_by_key(|rack| rack.taken);
    Ok(report(&racks))
}

fn report(racks: &[TakenRack]) -> String {
    let rows: Vec<_> = racks.iter().flat_map(TakenRack::rows).collect();
    let mut report = format!("\n{}\n", table(&HEAD, &rows));
    if let [fewest, .., most] = racks {
        report += &ratios("reserve_64_taken", &most.many.per_second, &fewest.many.per_second);
        report += &ratios("reserve_1_taken", &most.one.per_second, &fewest.one.per_second);
    }
    report
}

impl TakenRack {
    async fn start(args: &Args, programs: &Programs, disk: &Disk, taken: u32) -> Result<Self, Failure> {
        let folder = disk.folder(&format!("taken-{taken}"))?;
        let mut rack = Rack::start(args.plan, programs, &folder).await?;
        let channels = rack.connect(args.channels).await?;
        rack.take(&channels[0], taken).await?;
        let mut rack = Self { taken, rack, channels, one: Series::default(), many: Series::default() };
        rack.load(args, MANY, "warm", Duration::from_millis(300)).await?;
        (rack.one, rack.many) = Default::default();
        Ok(rack)
    }

    async fn round(&mut self, args: &Args, round: &str) -> Result<(), Failure> {
        for clients in [1, MANY] {
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
        let ends = Ends { after, writes_max: WRITES_MAX };
        let measured = reserve(&mut self.rack, &self.channels, writers, ends).await?;
        note(&format!("tarn, {} taken", self.taken), clients, &measured.outcome);
        let series = if clients == 1 { &mut self.one } else { &mut self.many };
        series.add(&measured.outcome, measured.before, measured.after);
        Ok(())
    }

    fn rows(&self) -> [Vec<String>; 2] {
        let name = |clients: &str| format!("tarn, {} slices taken, {clients}", self.taken);
        [self.one.row(&name("1 client")), self.many.row(&name("64 clients"))]
    }
}
