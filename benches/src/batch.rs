//! What a file costs that is put in a batch, by the client library and without a mount.

use std::time::Instant;

use dray_client::{Client, ConnectOptions, Target};
use dray_rt::{DriverKind, Executor};

use crate::args::BenchArgs;
use crate::measure::Measure;
use crate::{CommandResult, context};

/// Bytes of each file.
const FILE_BYTES: usize = 4096;

/// `batch --target TARGET [--files N] [--rounds N]`
///
/// Puts files of 4 KiB into a new directory, in one call and one by one, in turn. Prints the time of a file of
/// both, microseconds.
pub fn run(args: &BenchArgs) -> CommandResult {
    let target: Target = args.need("target")?.parse()?;
    let files = args.number::<usize>("files", 2000)?.clamp(1, 100_000);
    let rounds = args.number::<u32>("rounds", 5)?.clamp(1, 100);
    let mut executor = Executor::new(DriverKind::Epoll).map_err(context("executor"))?;
    executor.block_on(async {
        let client = Client::connect(&target, &ConnectOptions::default()).await;
        let client = client.map_err(context("connect"))?;
        for round in 0..rounds {
            one_round(&client, files, round).await?;
        }
        client.goodbye();
        Ok(())
    })
}

async fn one_round(client: &Client, files: usize, round: u32) -> CommandResult {
    let name = format!("batch-{}-{round}", std::process::id());
    client.mkdir(&name, 0o755).await.map_err(context("mkdir"))?;
    let dir = client.dir(&name).await.map_err(context("find the directory"))?;
    let (names, content) = (files_of("b", files), vec![7; FILE_BYTES]);
    let batch: Vec<(&str, &[u8])> = names.iter().map(|name| (&**name, &content[..])).collect();
    let begun = Instant::now();
    for put in dir.put_all(&batch).await {
        put.map_err(context("put"))?;
    }
    say("batch_put_us", begun, files, round);
    let names = files_of("s", files);
    let begun = Instant::now();
    for name in &names {
        dir.put(name, &content).await.map_err(context("put"))?;
    }
    say("single_put_us", begun, files, round);
    Ok(())
}

fn files_of(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{prefix}{number}")).collect()
}

fn say(metric: &str, begun: Instant, files: usize, round: u32) {
    let value = begun.elapsed().as_secs_f64() * 1e6 / files as f64;
    let (arm, metric, unit) = ("dray".to_owned(), metric.to_owned(), "us".to_owned());
    let measure = Measure { bench: "leases".to_owned(), arm, metric, value, unit, round };
    println!("{}", measure.line());
}
