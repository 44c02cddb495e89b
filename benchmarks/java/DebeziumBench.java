import io.debezium.embedded.Connect;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.connect.data.Struct;
import org.apache.kafka.connect.source.SourceRecord;

/**
 * Debezium's engine to nowhere. Each line of standard input asks for one reading, `rows name=value name=value …` with tabs between, and is
 * answered by one line of JSON.
 */
public final class DebeziumBench {
    private static final long PATIENCE_SECONDS = 180;

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err);
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            String[] words = line.split("\t");
            Properties properties = new Properties();
            for (String word : Arrays.asList(words).subList(1, words.length)) {
                int cut = word.indexOf('=');
                properties.setProperty(word.substring(0, cut), word.substring(cut + 1));
            }
            answers.println(new Reading(Integer.parseInt(words[0])).run(properties));
            answers.flush();
        }
        System.exit(0);
    }

    /** One slot, read until as many records have come as were asked for; the clock runs from the first batch of them to the last. */
    private static final class Reading implements DebeziumEngine.ChangeConsumer<RecordChangeEvent<SourceRecord>> {
        private final long[] agesMicros;
        private final CountDownLatch over = new CountDownLatch(1);
        private int seen;
        private int seenBefore;
        private long startNanos;
        private long endNanos;
        private long startCpuNanos;
        private long endCpuNanos;
        private volatile String failure;

        Reading(int rows) {
            agesMicros = new long[rows];
        }

        String run(Properties properties) throws Exception {
            DebeziumEngine<RecordChangeEvent<SourceRecord>> engine = DebeziumEngine.create(ChangeEventFormat.of(Connect.class))
                    .using(properties)
                    .notifying(this)
                    .using((isFine, message, error) -> {
                        if (!isFine) {
                            failure = String.valueOf(error == null ? message : error);
                        }
                        over.countDown();
                    })
                    .build();
            ExecutorService thread = Executors.newSingleThreadExecutor();
            thread.execute(engine);
            if (!over.await(PATIENCE_SECONDS, TimeUnit.SECONDS)) {
                failure = "only " + seen + " records came in time";
            }
            engine.close();
            thread.shutdown();
            return failure == null ? report() : "{\"failure\": \"" + failure.replaceAll("[\"\\\\\\p{Cntrl}]", " ") + "\"}";
        }

        @Override
        public void handleBatch(
                List<RecordChangeEvent<SourceRecord>> records,
                DebeziumEngine.RecordCommitter<RecordChangeEvent<SourceRecord>> committer) throws InterruptedException {
            long nowMicros = Math.multiplyExact(System.currentTimeMillis(), 1000L);
            for (RecordChangeEvent<SourceRecord> record : records) {
                if (seen < agesMicros.length) {
                    agesMicros[seen++] = nowMicros - ((Struct) record.record().value()).getStruct("source").getInt64("ts_us");
                }
            }
            // The last one stands for all: the fastest way that the engine allows.
            committer.markProcessed(records.get(records.size() - 1));
            committer.markBatchFinished();
            if (startNanos == 0) {
                seenBefore = seen;
                startNanos = System.nanoTime();
                startCpuNanos = cpuNanos();
            }
            if (seen == agesMicros.length && endNanos == 0) {
                endNanos = System.nanoTime();
                endCpuNanos = cpuNanos();
                over.countDown();
            }
        }

        private String report() {
            Arrays.sort(agesMicros);
            return String.format(
                    Locale.ROOT,
                    "{\"rows\": %d, \"rows_before\": %d, \"wall_seconds\": %.6f, \"cpu_seconds\": %.6f, "
                            + "\"p50_seconds\": %.6f, \"p99_seconds\": %.6f, \"max_seconds\": %.6f}",
                    seen, seenBefore, (endNanos - startNanos) / 1e9, (endCpuNanos - startCpuNanos) / 1e9,
                    age(0.5), age(0.99), age(1.0));
        }

        private double age(double share) {
            return agesMicros[(int) Math.round(share * (agesMicros.length - 1))] / 1e6;
        }

        private static long cpuNanos() {
            return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
        }
    }
}
