//! Compares the time of one frigid-memory prediction on one thread with LightGBM.
//!
//! Goal: less than half of the time of LightGBM's fastest C call, and less than a tenth of the time
//! of LightGBM's Python API. Tarn and LightGBM use the same model, with LightGBM's default number
//! of trees and leaves. The results of Tarn and the C call must be equal for every row.

use std::{
    ffi::{CString, c_char, c_int, c_void},
    hint::black_box,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    ptr,
    time::Instant,
};

use benches::{
    failure::Failure,
    report::{Rounds, format_ratio, format_table},
};
use libloading::Library;
use prediction::{frigid::FEATURE_COUNT, import::lightgbm::Model};

const ROUND_COUNT: usize = 7;
/// Number of timed predictions in each round.
const PREDICTIONS_PER_ROUND: usize = 20_000;
/// Environment variable with the path of a Python environment that contains LightGBM. `cargo xtask
/// bench` creates this environment.
const LIGHTGBM_ENV: &str = "TARN_LIGHTGBM";
const TRAIN_SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/lightgbm/train.py");

fn main() -> ExitCode {
    match measure() {
        Ok(report) => {
            print!("{report}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("frigid_predict: {}", failure.error_chain());
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<String, Failure> {
    let python =
        PythonEnvironment(std::env::var_os(LIGHTGBM_ENV).map(PathBuf::from).ok_or(Failure::LightGbmMissing)?);
    let folder =
        tempfile::tempdir().map_err(Failure::file_error("create a folder in", std::env::temp_dir()))?;
    python.run("make", folder.path())?;
    let (model, rows) = (folder.path().join("model.txt"), folder.path().join("rows.f64"));
    let text = std::fs::read_to_string(&model).map_err(Failure::file_error("read", &model))?;
    let bytes = std::fs::read(&rows).map_err(Failure::file_error("read", &rows))?;
    let numbers = bytes
        .chunks_exact(8)
        .map(|number| f64::from_le_bytes(number.try_into().expect("a chunk has 8 bytes")));
    let numbers: Vec<f64> = numbers.collect();
    let rows: Vec<&[f64]> = numbers.chunks_exact(FEATURE_COUNT).collect();
    let tarn_model = Model::read(&text).map_err(|failure| Failure::UnexpectedReply {
        subject: "a model of LightGBM".to_owned(),
        reply: failure.to_string(),
    })?;
    let mut lightgbm_model = LightGbm::load(&python.find_library()?, &model)?;
    for row in &rows {
        let (prediction, expected) = (tarn_model.predict(row), lightgbm_model.predict(row));
        let is_equal = (prediction - expected).abs() <= 1e-9 * expected.abs().max(1.0);
        if !is_equal {
            let reply = format!("{prediction}, but LightGBM predicts {expected}");
            return Err(Failure::UnexpectedReply { subject: "prediction of a row".to_owned(), reply });
        }
    }
    let (mut tarn_ns, mut lightgbm_ns, mut python_ns) =
        (Rounds::default(), Rounds::default(), Rounds::default());
    for _ in 0..ROUND_COUNT {
        tarn_ns.add(ns_per_prediction(&rows, |row| tarn_model.predict(row)));
        lightgbm_ns.add(ns_per_prediction(&rows, |row| lightgbm_model.predict(row)));
        python_ns.add(python.run("time", folder.path())?.trim().parse().unwrap_or(f64::NAN));
    }
    let row = |name: &str, rounds: &Rounds| vec![name.to_owned(), rounds.summary()];
    let rows = [row("Tarn", &tarn_ns), row("LightGBM, C", &lightgbm_ns), row("LightGBM, Python", &python_ns)];
    let table = format_table(&["one prediction", "ns"], &rows);
    let c_ratio = format_ratio("frigid_predict_vs_lightgbm_c", lightgbm_ns.median() / tarn_ns.median());
    let python_ratio =
        format_ratio("frigid_predict_vs_lightgbm_python", python_ns.median() / tarn_ns.median());
    Ok(format!("{table}{c_ratio}\n{python_ratio}\n"))
}

/// Measures one round of predictions and returns the mean duration of a prediction, in nanoseconds.
fn ns_per_prediction(rows: &[&[f64]], mut predict: impl FnMut(&[f64]) -> f64) -> f64 {
    let start = Instant::now();
    for row in rows.iter().cycle().take(PREDICTIONS_PER_ROUND) {
        black_box(predict(black_box(row)));
    }
    start.elapsed().as_nanos() as f64 / PREDICTIONS_PER_ROUND as f64
}

/// Path of a Python environment that contains LightGBM.
struct PythonEnvironment(PathBuf);

impl PythonEnvironment {
    fn run(&self, mode: &str, folder: &Path) -> Result<String, Failure> {
        let program = self.0.join("bin/python");
        let mut command = Command::new(&program);
        command.arg(TRAIN_SCRIPT).arg(mode).arg(folder).arg(FEATURE_COUNT.to_string());
        let output = command.output().map_err(|source| Failure::Start { program, source })?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(local_rack::ProcessError::Ended {
                name: "train.py".to_owned(),
                status: output.status,
                log,
            }
            .into()),
        }
    }

    /// Returns the path of LightGBM's shared library in this environment.
    fn find_library(&self) -> Result<PathBuf, Failure> {
        let lib = self.0.join("lib");
        let versions = std::fs::read_dir(&lib).map_err(Failure::file_error("list", &lib))?;
        let library =
            |version: std::fs::DirEntry| version.path().join("site-packages/lightgbm/lib/lib_lightgbm.so");
        let mut libraries = versions.filter_map(Result::ok).map(library).filter(|library| library.is_file());
        libraries.next().ok_or(Failure::LightGbmMissing)
    }
}

type CreateFn = unsafe extern "C" fn(*const c_char, *mut c_int, *mut *mut c_void) -> c_int;
type PrepareFn = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
    i32,
    *const c_char,
    *mut *mut c_void,
) -> c_int;
type PredictFn = unsafe extern "C" fn(*mut c_void, *const c_void, *mut i64, *mut f64) -> c_int;

/// Model that is loaded into LightGBM's library, prepared for predictions of single rows. The model
/// and the library are never freed.
struct LightGbm {
    predict: PredictFn,
    fast_config: *mut c_void,
}

/// Value of LightGBM's constant `C_API_DTYPE_FLOAT64`.
const DTYPE_FLOAT64: c_int = 1;

impl LightGbm {
    fn load(library: &Path, model: &Path) -> Result<Self, Failure> {
        let failure = |error: libloading::Error| Failure::UnexpectedReply {
            subject: library.display().to_string(),
            reply: error.to_string(),
        };
        let path =
            CString::new(model.as_os_str().as_bytes()).expect("a temporary folder has no NUL in its name");
        let (mut trees, mut booster, mut fast_config) = (0, ptr::null_mut(), ptr::null_mut());
        // SAFETY: the initialization of LightGBM's library has no preconditions.
        let library = Box::leak(Box::new(unsafe { Library::new(library) }.map_err(failure)?));
        // SAFETY: the function type matches the declaration in LightGBM's c_api.h.
        let create: CreateFn =
            *unsafe { library.get(b"LGBM_BoosterCreateFromModelfile") }.map_err(failure)?;
        // SAFETY: the function type matches the declaration in LightGBM's c_api.h.
        let prepare: PrepareFn =
            *unsafe { library.get(b"LGBM_BoosterPredictForMatSingleRowFastInit") }.map_err(failure)?;
        // SAFETY: the function type matches the declaration in LightGBM's c_api.h.
        let predict: PredictFn =
            *unsafe { library.get(b"LGBM_BoosterPredictForMatSingleRowFast") }.map_err(failure)?;
        let features = i32::try_from(FEATURE_COUNT).expect("a row has few numbers");
        // SAFETY: the path ends with NUL, and both out pointers are valid for writes.
        let created = unsafe { create(path.as_ptr(), &raw mut trees, &raw mut booster) };
        // SAFETY: the booster was created (code 0), the parameters end with NUL, and the out
        // pointer is valid for writes.
        let prepared = unsafe {
            if created == 0 {
                prepare(
                    booster,
                    0,
                    0,
                    -1,
                    DTYPE_FLOAT64,
                    features,
                    c"num_threads=1".as_ptr(),
                    &raw mut fast_config,
                )
            } else {
                created
            }
        };
        match prepared {
            0 => Ok(Self { predict, fast_config }),
            code => Err(Failure::UnexpectedReply {
                subject: "LightGBM".to_owned(),
                reply: format!("error {code}"),
            }),
        }
    }

    fn predict(&mut self, row: &[f64]) -> f64 {
        assert_eq!(row.len(), FEATURE_COUNT);
        let (mut length, mut prediction) = (0, f64::NAN);
        // SAFETY: `fast_config` was prepared for rows of this length and returns one number per
        // row. Only one thread uses it.
        let code = unsafe {
            (self.predict)(self.fast_config, row.as_ptr().cast(), &raw mut length, &raw mut prediction)
        };
        assert!(code == 0 && length == 1, "LightGBM: error {code}, {length} results");
        prediction
    }
}
